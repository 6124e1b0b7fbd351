"""``python -m bflcore.cli`` is ``bfl``."""

from bflcore.cli import main

if __name__ == "__main__":
    main()
