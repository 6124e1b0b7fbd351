"""The script that follows a page as a reader would."""

import subprocess
import sys

import pytest

from .blocks import FOLLOW, follow

PAGE = """# A page

<!-- writes: numbers.txt -->
```text
1
2
```

<!-- shortened: total = 3 => total = 4 -->
```python
total = 3
```

  ```python
  from pathlib import Path
  assert total == sum(map(int, Path("numbers.txt").read_text().split()))
  Path("done.txt").write_text(str(total))
  ```

<!-- not run: it would fail -->
```python
raise ValueError
```

<!-- prints -->
```text
total 3
```
"""


def test_a_page_is_followed_unshortened(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    command = [sys.executable, str(FOLLOW), str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "done.txt").read_text() == "3"
    assert done.stdout.rstrip().endswith(" s")


def test_comments_before_a_block_are_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    numbers, total, check, failing, printed = follow.blocks(page)
    assert numbers.writes == "numbers.txt"
    assert (total.text, total.short()) == ("total = 3\n", "total = 4\n")
    assert check.text.startswith("from pathlib import Path\nassert")
    assert failing.reason == "it would fail"
    assert printed.prints
    assert [block.line for block in (numbers, total)] == [4, 10]


def test_a_command_that_fails_ends_the_walk(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nfalse\n```\n\n```python\nopen('later.txt', 'w')\n```\n")
    command = [sys.executable, str(FOLLOW), str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "later.txt").exists()


def test_a_block_that_is_not_run_needs_a_reason(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- not run -->\n```bash\nbfl list\n```\n")
    with pytest.raises(ValueError, match="line 2: expected <!-- not run: ... -->"):
        follow.blocks(page)
