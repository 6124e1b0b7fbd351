"""The page: everything on it comes from the table."""

from pathlib import Path

import attrs
import numpy as np
import pytest

from bfl_shift.page import leaderboard, page
from bfl_shift.table import PUBLISHED, Table


@pytest.fixture
def text(table, toy):
    return page(table)


def test_the_page_has_the_command_the_settings_and_a_section_per_shift(table, text, toy):
    assert table.command in text
    assert "train_per_class=12" in text
    for name in table.shifts:
        assert f"\n### {name}\n" in text
    assert "No run is missing." in text


def test_a_row_has_the_scores_of_the_table(table, text):
    section = text.split("### blur\n")[1].split("###")[0]
    row = next(line for line in section.splitlines() if "`local`" in line)
    nll = np.mean([*table.values("blur", "nll")["local"].values()])
    assert f" {nll:.3f} " in row
    assert row.count("|") == section.splitlines()[4].count("|")


def test_what_is_missing_is_named(table, toy):
    gap = ("clean", "fedvi", 1, "client 3 failed")
    text = page(attrs.evolve(table, missing=(gap,)))
    assert "| clean | `fedvi` | 1 | client 3 failed |" in text


def test_what_training_and_scoring_took_is_said(table, toy):
    seconds = {"training": {"a/seed-0": 100.0, "b/seed-0": 200.0}, "scoring": {"a/seed-0": 120.0}}
    assert "2 trainings took 5 minutes and scoring 2 of one process" in page(
        attrs.evolve(table, seconds=seconds)
    )
    untimed = page(attrs.evolve(table, seconds={**seconds, "scoring": {}}))
    assert "2 trainings took 5 minutes of one process" in untimed


def test_notes_are_on_the_page(table, toy):
    note = "Checked on another processor."
    assert note not in page(table)
    assert note in page(attrs.evolve(table, notes=(note,)))


def test_the_published_page_and_picture_are_those_of_the_table_that_the_package_has():
    results = Path(__file__).parents[3] / "docs" / "results"
    if not results.is_dir():
        pytest.skip("needs the repository: the pages are not part of the package")
    published = Table.read(PUBLISHED)
    assert (results / "bfl-shift.md").read_text(encoding="utf-8") == page(published)
    assert (results / "bfl-shift.json").samefile(PUBLISHED)


def test_the_leaderboard_begins_with_the_best(table):
    head, *rows = leaderboard(table)
    assert head[:2] == ["place", "method"]
    assert [row[0] for row in rows] == ["1", "2"]
    assert float(rows[0][2]) <= float(rows[1][2])


def test_deviations_are_over_seeds(table, toy):
    again = [attrs.evolve(record, seed=1) for record in table.records]
    twice = attrs.evolve(table, seeds=(0, 1), records=(*table.records, *again))
    assert "± 0.000" in page(twice)
    assert "±" not in page(table).split("### reference")[1]
