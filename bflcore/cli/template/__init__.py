"""The files of a new plugin: what ``bfl new-plugin`` writes."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from bflcore import __version__
from bflcore.errors import OptionError, RunError

__all__ = ["write_plugin"]

# Where each template goes.
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "init.py": "$package/__init__.py",
    "plugin.py": "$package/plugin.py",
    "inference.py": "$package/$module.py",
    "py.typed": "$package/py.typed",
    "test_conformance.py": "tests/test_${module}_conformance.py",
    "test_method.py": "tests/test_${module}.py",
}


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Write the distribution ``bfl-NAME`` to `folder`, which must not exist; return its files.

    Raises `OptionError` for a name that is not allowed, `RunError` if a file cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise OptionError(
            f"NAME: {name!r} is not allowed; allowed: lower-case words joined by hyphens, "
            "for example fed-laplace"
        )
    if folder.exists():
        raise RunError(f"{folder} exists; choose another folder with --out, or remove it")
    module = name.replace("-", "_")
    major, minor, *_ = __version__.split(".")
    words = {
        "name": name,
        "module": module,
        "package": f"bfl_{module}",
        "Class": "".join(word.capitalize() for word in name.split("-")),
        "requires": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }
    written = []
    try:
        for source, target in FILES.items():
            path = folder / Template(target).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (files(__package__) / "files" / f"{source}.in").read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror})") from None
    return written
