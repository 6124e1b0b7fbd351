"""A reader who types the blocks of a page of the manual, in a short version.

`examples/follow.py` reads the blocks and says which comments they may have. One more comment holds
for a whole page:

    <!-- bfl run gets: FLAGS -->      flags that the test adds to each ``bfl run``
"""

import importlib.util
import re
import shlex
import sys
import types
import warnings
from pathlib import Path

from bflcore.errors import RunWarning

FOLLOW = Path(__file__).parents[2] / "examples" / "follow.py"
NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def imported(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


follow = imported(FOLLOW)


def added_flags(page):
    """Return the flags that the page's test adds to each ``bfl run``."""
    found = re.search(r"<!-- bfl run gets: (.*?) -->", page.read_text(encoding="utf-8"), re.DOTALL)
    return shlex.split(found[1]) if found else []


def masked(text):
    """Return the lines of an output with every number as ``#`` and single spaces."""
    lines = (" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines())
    return [line for line in lines if line]


class Reader:
    """Somebody who types a page's blocks, one after another."""

    def __init__(self, page, bfl, capsys):
        self.page, self.bfl, self.capsys = page, bfl, capsys
        self.flags = added_flags(page)
        self.module = types.ModuleType("manual_page")
        self.printed = ""

    def type(self, block):
        """Execute, write or compare one block."""
        if block.writes is not None:
            Path(block.writes).write_text(block.text, encoding="utf-8")
        elif block.prints:
            missing = [line for line in masked(block.text) if line not in masked(self.printed)]
            assert not missing, f"line {block.line}: not printed: {missing}; was\n{self.printed}"
        elif block.info == "bash" and block.reason is None:
            words = follow.commands(block.short())
            self.printed = "".join(self.command(each, block.line) for each in words)
        elif block.info == "python" and block.reason is None:
            code = compile("\n" * block.line + block.short(), str(self.page), "exec")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RunWarning)
                exec(code, vars(self.module))
            self.printed = self.capsys.readouterr().out

    def command(self, words, line):
        """Run one command of ours; return all that it printed."""
        assert words[0] == "bfl", f"line {line}: {words[0]} is not ours: mark the block as not run"
        more = self.flags if words[1] == "run" else []
        status, out, err = self.bfl(*words[1:], *more)
        assert status == 0, f"line {line}: {shlex.join(words)} failed: {err}"
        return out + err
