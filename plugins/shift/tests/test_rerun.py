"""Running a part of a table again."""

import attrs
import pytest

from bfl_shift.rerun import rerun, sample
from bfl_shift.shifts import shifts_of
from bflcore.errors import OptionError


def test_a_part_of_a_table_is_equal_to_the_bit_and_a_changed_record_is_named(table, toy, tiny):
    chosen = sample(table, [*shifts_of(tiny).values()], 0.3)  # two of six runs
    assert len(chosen) == 2
    training, method, seed = chosen[0]
    spoilt = next(
        record
        for record in table.records
        if record.method == method and shifts_of(tiny)[record.shift].training == training
    )
    records = [
        attrs.evolve(record, digest="0") if record is spoilt else record for record in table.records
    ]
    said, standings = [], []
    spoilt_table = attrs.evolve(table, records=tuple(records))
    found = rerun(spoilt_table, 0.3, 1, standings.append, said.append)
    assert {one.total for one in standings} == {2}
    assert [one.done for one in standings if one.ended] == [1, 2]
    assert found.runs == 2
    assert found.differing == (f"{method}, {spoilt.shift}, seed {seed}",)
    assert found.records > len(found.differing)
    assert sum("differs in" in line for line in said) == 1


def test_the_part_is_the_same_for_equal_tables_and_never_empty(table, tiny):
    shifts = [*shifts_of(tiny).values()]
    assert sample(table, shifts, 0.5) == sample(table, shifts, 0.5)
    assert len(sample(table, shifts, 0.001)) == 1
    assert len(sample(table, shifts, 1)) == 6


def test_how_far_a_check_is_covers_all_seeds(table, toy):
    records = [attrs.evolve(r, seed=seed) for r in table.records for seed in (0, 1)]
    standings = []
    rerun(
        attrs.evolve(table, records=tuple(records), seeds=(0, 1)),
        0.3,
        1,
        standings.append,
        lambda _: None,
    )
    assert {one.total for one in standings} == {4}
    ended = [one for one in standings if one.ended]
    assert [one.done for one in ended] == [1, 2, 3, 4]
    assert ended[-1].left is None


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5])
def test_other_fractions_are_refused(table, toy, fraction):
    with pytest.raises(OptionError, match="--check: .* is not allowed; allowed: above 0"):
        rerun(table, fraction, 1, lambda _: None, lambda _: None)
