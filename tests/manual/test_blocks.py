"""Every block of the manual is executed, or says why it is not."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from .blocks import Reader, follow, masked

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("start", "concepts", "methods", "coming-from", "extending", "reference")
PAGES = sorted(
    [
        *(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md")),
        *(
            DOCS / f"{name}.md"
            for name in ("index", "own-data", "evidence", "gallery", "writing-plugins")
        ),
        ROOT / "README.md",
        # All that a user of the benchmark does with it takes minutes.
        *(page for page in ROOT.glob("plugins/*/README.md") if page.parent.name != "shift"),
    ]
)
INFOS = {"bash", "python", "text", "toml", "csv"}
# Why blocks are not run, and how many there are of each.
NOT_RUN = {
    "as printed, training ends without a valid posterior": 1,
    "installs packages": 17,
    "needs a download": 2,
    "needs a table of your own": 2,
    "needs another library": 3,
    "needs another library's checkout": 1,
    "needs another library's servers": 1,
    "needs what servers trained": 1,
    "starts servers": 3,
    "takes minutes even when shortened": 5,
}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page, bfl, capsys, monkeypatch):
    reader = Reader(page, bfl, capsys)
    monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)
    for block in follow.blocks(page):
        reader.type(block)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page):
    for block in follow.blocks(page):
        where = f"line {block.line}"
        assert block.info in INFOS, where
        assert (block.reason is None) or block.info in ("bash", "python"), where
        assert not block.prints or block.info == "text", where
        if block.info == "text" and block.writes is None:
            first = {line.split()[0] for line in block.text.splitlines() if line.strip()}
            assert not first & {"bfl", "import", "from", "pip", "make"}, (
                f"{where}: is it a command?"
            )


def test_blocks_that_are_not_run_are_counted():
    reasons = Counter(
        block.reason for page in PAGES for block in follow.blocks(page) if block.reason
    )
    assert dict(reasons) == NOT_RUN


def test_a_page_cannot_claim_what_is_not_printed(tmp_path, bfl, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint('loss  0.25')\n```\n\n<!-- prints -->\n```text\nloss 0.31\n```\n"
        "<!-- prints -->\n```text\nerror 0.31\n```\n"
    )
    said, right, wrong = follow.blocks(page)
    reader = Reader(page, bfl, capsys)
    reader.type(said)
    reader.type(right)
    with pytest.raises(AssertionError, match="line 10: not printed"):
        reader.type(wrong)


def test_a_failing_command_fails_its_page(tmp_path, bfl, capsys):
    page = tmp_path / "page.md"
    page.write_text("```bash\nbfl show method fedvy\n```\n")
    (block,) = follow.blocks(page)
    with pytest.raises(AssertionError, match="line 1: bfl show method fedvy failed: .*fedvi"):
        Reader(page, bfl, capsys).type(block)


def test_what_is_shortened_must_be_there(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- shortened: --rounds 9 => --rounds 1 -->\n```bash\nbfl run fedvi\n```\n")
    (block,) = follow.blocks(page)
    with pytest.raises(ValueError, match="line 2: nothing to shorten"):
        block.short()


def test_commands_are_read_as_a_shell_reads_them():
    text = "bfl run fedvi \\\n    --rounds 2  # quick\n\nbfl list 'a b'\n"
    assert follow.commands(text) == [
        ["bfl", "run", "fedvi", "--rounds", "2"],
        ["bfl", "list", "a b"],
    ]
    assert masked("round  2/40   loss 0.58\n\nECE -1.2e-3") == ["round #/# loss #", "ECE #"]
