"""Do what a page of the manual says, in the current folder, and say how long it took.

    python follow.py PAGE

The page's commands run as a reader would type them, its Python blocks in this process. Comments
before a block, which readers do not see, say what tests do with it:

    <!-- not run: REASON -->                  it is not run, here neither
    <!-- shortened: TEXT => OTHER TEXT -->    what tests replace, such as the number of rounds
    <!-- prints -->                           a block of text that the block before it prints
    <!-- writes: FILE -->                     a block of text: the content of a file
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"(?P<before>(?:^ *<!--[^>]*(?:=>[^>]*)?-->\n\s*)*)"
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)
COMMENT = re.compile(r"<!-- (not run|shortened|prints|writes)(?:: (.*?))? -->", re.DOTALL)


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

    def short(self) -> str:
        """Return the text that tests execute. Raises `ValueError` if a replacement has no place."""
        text = self.text
        for old, new in self.shortened:
            if old not in text:
                raise ValueError(f"line {self.line}: nothing to shorten, {old!r} is not there")
            text = text.replace(old, new)
        return text


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page. Raises `ValueError` for a comment that does not say enough."""
    text = page.read_text(encoding="utf-8")
    return [_block(match, text) for match in BLOCK.finditer(text)]


def commands(text: str) -> list[list[str]]:
    """Return the commands of a block as lists of words, without comments and line ends."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def _block(match: re.Match[str], page: str) -> Block:
    indent = len(match["indent"])
    lines = (line[indent:] if line.strip() else line for line in match["text"].splitlines(True))
    line = page.count("\n", 0, match.start("info")) + 1
    block = Block(match["info"].strip(), "".join(lines), line)
    for comment, said in COMMENT.findall(match["before"]):
        if comment == "prints":
            block.prints = True
            continue
        if not said:
            raise ValueError(f"line {line}: expected <!-- {comment}: ... -->")
        if comment == "not run":
            block.reason = said
        elif comment == "writes":
            block.writes = said
        else:
            old, _, new = said.partition(" =>")
            block.shortened.append((old, new.strip()))
    return block


def follow(page: Path) -> None:
    """Write, run and execute a page's blocks from top to bottom."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.writes:
            Path(block.writes).write_text(block.text, encoding="utf-8")
        elif block.reason is None and block.info == "bash":
            for words in commands(block.text):
                print("$", shlex.join(words), flush=True)
                subprocess.run(words, check=True)  # noqa: S603 - the page's own commands
        elif block.reason is None and block.info == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            exec(code, namespace)  # noqa: S102 - likewise


def main(page: str) -> None:
    """Follow a page and print the seconds that it took."""
    begun = time.monotonic()
    follow(Path(page))
    print(f"{page}: {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
