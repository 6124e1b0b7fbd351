"""The fenced blocks of a page of the manual, and how the tests execute them.

Commands (``bash``) and Python are executed from top to bottom, in one folder and one namespace per
page. Comments before a block, which readers do not see, say otherwise:

    <!-- not run: REASON -->                  it cannot run here
    <!-- shortened: TEXT => OTHER TEXT -->    what the test replaces, such as the number of rounds
    <!-- prints -->                           a block of text: lines that the block before it prints
    <!-- writes: FILE -->                     a block of text: the content of a file

and one comment for the whole page:

    <!-- bfl run gets: FLAGS -->              flags that the test adds to each ``bfl run``
"""

from __future__ import annotations

import re
import shlex
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from bflcore.errors import RunWarning

BLOCK = re.compile(
    r"(?P<before>(?:^ *<!--[^>]*-->\n\s*)*)^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)
COMMENT = re.compile(r"<!-- (not run|shortened|prints|writes)(?:: (.*?))? -->", re.DOTALL)
NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
RUNNABLE = ("bash", "python")


@dataclass
class Block:
    """One fenced block: what it is, its text, and what the comments before it say."""

    info: str
    text: str
    line: int
    reason: str | None = None  # why it is not run
    prints: bool = False
    writes: str | None = None
    shortened: list[tuple[str, str]] = field(default_factory=list)

    def short(self):
        """Return the text that the test executes; every declared replacement must apply."""
        text = self.text
        for old, new in self.shortened:
            assert old in text, f"line {self.line}: nothing to shorten, {old!r} is not there"
            text = text.replace(old, new)
        return text


def blocks(page):
    """Return the blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        indent = len(match["indent"])
        lines = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(True))
        block = Block(match["info"].strip(), lines, text.count("\n", 0, match.start("info")) + 1)
        for comment, said in COMMENT.findall(match["before"]):
            if comment == "not run":
                assert said, f"line {block.line}: a block that is not run needs a reason"
                block.reason = said
            elif comment == "prints":
                block.prints = True
            elif comment == "writes":
                block.writes = said
            else:
                old, arrow, new = said.partition(" => ")
                assert arrow, f"line {block.line}: expected TEXT => OTHER TEXT, got {said!r}"
                block.shortened.append((old, new.strip("'") if new != "''" else ""))
        found.append(block)
    return found


def added_flags(page):
    """Return the flags that the page's test adds to each ``bfl run``."""
    found = re.search(r"<!-- bfl run gets: (.*?) -->", page.read_text(encoding="utf-8"), re.DOTALL)
    return shlex.split(found[1]) if found else []


def commands(text):
    """Return the commands of a block as lists of words; comments and line ends are removed."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


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
            assert missing in ([], ["..."]), f"line {block.line}: not printed; was\n{self.printed}"
        elif block.info == "bash" and block.reason is None:
            self.printed = "".join(self.command(words, block.line) for words in commands(block.short()))
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
