"""The page: everything on it comes from the table."""

import attrs
import numpy as np
import pytest

from bfl_shift.page import leaderboard, page


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
