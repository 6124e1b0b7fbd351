"""Figures on the pages of methods are those of a results page or of a plugin's page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scipy.stats import t as student

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
SOURCES = [
    *ROOT.glob("docs/results/**/*.md"),
    *ROOT.glob("plugins/*/README.md"),
    ROOT / "docs" / "evidence.md",
]
# Written, and compared with the record, by docs/under_shift.py.
BY_SCRIPT = re.compile(r"<!-- under shift: .*?<!-- end of under shift -->", re.DOTALL)
FIGURE = re.compile(r"(?<![\w.])\d*\.\d+(?![\w.]*\d)")


def figures(text):
    """Return the decimal numbers of a text, as they are written."""
    return FIGURE.findall(text)


def said(page):
    """Return the figures of a page with four significant digits or three decimals."""
    text = re.sub(BY_SCRIPT, "", page.read_text(encoding="utf-8"))
    prose = re.sub(
        r"^ *```.*?^ *```|\$\$.*?\$\$|`[^`]*`|\$[^$\n]*\$", "", text, flags=re.DOTALL | re.MULTILINE
    )
    return [f for f in figures(prose) if len(f.partition(".")[2]) >= 3 or len(f) >= 5]


def known():
    texts = (source.read_text(encoding="utf-8") for source in SOURCES)
    return sorted({float(f) for text in texts for f in figures(text)})


@pytest.fixture(scope="module")
def sources():
    return known()


def missing(found, sources):
    """Return the figures that no source has, not even with more digits."""
    lost = []
    for figure in found:
        digits = len(figure.partition(".")[2])
        if not any(abs(value - float(figure)) <= 0.5001 * 10**-digits for value in sources):
            lost.append(figure)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_has_a_source(page, sources):
    assert missing(said(page), sources) == []


def test_an_invented_figure_is_noticed(sources):
    assert missing(["89.73", "0.31415"], sources) == ["0.31415"]
    assert sum(len(said(page)) for page in PAGES) > 100


def test_not_distinguishable_is_defined_once_by_students_t():
    definition = ROOT / "docs" / "concepts" / "evaluation.md"
    text = definition.read_text(encoding="utf-8").partition("\n## Not distinguishable\n")[2]
    rows = re.findall(r"^\| (?:seeds|standard errors) \| (.*) \|$", text, re.MULTILINE)
    seeds, errors = (row.split(" | ") for row in rows)
    assert errors == [f"{student.ppf(0.975, int(n) - 1):.1f}" for n in seeds]
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md"), ROOT / "README.md"]:
        said = " ".join(page.read_text(encoding="utf-8").split())
        another = r"(within|below|exceeds?|more than) (two|2) standard errors"
        assert re.findall(another, said) == [], page
