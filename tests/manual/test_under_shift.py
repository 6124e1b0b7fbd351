"""What pages of methods say about BFL-Shift follows from its record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .blocks import imported

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
shift = imported(ROOT / "docs" / "under_shift.py")
TABLE = shift.read()


def named(page):
    """Return the methods that a page's table under shift is about."""
    found = re.search(shift.BLOCK, page.read_text(encoding="utf-8"))
    return found["methods"].split() if found else []


def test_every_method_of_the_record_is_on_one_page():
    listed = [method for page in PAGES for method in named(page)]
    assert sorted(listed) == sorted(TABLE.methods)


@pytest.mark.parametrize("page", [p for p in PAGES if named(p)], ids=lambda page: page.stem)
def test_the_table_of_a_page_is_that_of_the_record(page):
    text = page.read_text(encoding="utf-8")
    assert shift.renewed(text, TABLE) == text, "run: python docs/under_shift.py"


def test_a_figure_is_that_of_the_record():
    seeds = TABLE.values("reference", "nll")
    mean = sum(seeds["pvi"].values()) / 3
    row = shift.row(TABLE, "pvi")
    assert row.split("|")[3].split()[0] == f"{mean:.3f}" == "0.595"
    assert row.split("|")[2].strip() == "14 (13 to 16)"
    # The half-width of Student's interval is 4.303 standard errors with three seeds.
    differences = [seeds["pvi"][s] - seeds["fedavg"][s] for s in (0, 1, 2)]
    centre = sum(differences) / 3
    error = (sum((d - centre) ** 2 for d in differences) / 2 / 3) ** 0.5
    assert f"({centre:+.3f} ± {4.3027 * error:.3f})" in row


def test_an_altered_figure_is_noticed():
    page = ROOT / "docs" / "methods" / "pvi.md"
    text = page.read_text(encoding="utf-8")
    altered = text.replace("| 0.595 ", "| 0.495 ")
    assert altered != text
    assert shift.renewed(altered, TABLE) == text


def test_shifts_under_which_a_run_failed_are_left_out_and_named():
    said = shift.block(TABLE, ["bayes-admm", "fedlap"])
    assert "`bayes-admm`: without tiny-clients, where its runs failed" in said
