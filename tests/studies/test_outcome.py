import math

import attrs
import pytest
from scipy import stats

from bflcore.studies.outcome import Compared, check, compared
from bflcore.studies.paper_tables import (
    Claim,
    Column,
    Metric,
    Protocol,
    Recipe,
    Rounds,
    Row,
    Setting,
    Table,
)
from bflcore.studies.plan import Planned

ACCURACY = Metric("personal.accuracy", "accuracy, %")
COLUMN = Column("small", Setting("small"), ACCURACY)
ROW = Row("bpfed", Recipe("bpfed", "bpfed"), {"small": 89.68})


def table(better="higher"):
    columns = tuple(
        Column(name, Setting(name), attrs.evolve(ACCURACY, better=better, scale=1.0))
        for name in ("one", "two")
    )
    rows = tuple(Row(name, Recipe(name, "fedavg")) for name in "abc")
    protocol = Protocol("p", "", "0-2", Rounds(9, 1), {}, {})
    return Table("t", "", "", protocol, columns, rows)


def cells(of, **values):
    """Return cells by row and column: ``a_one=[...]`` are the values of seeds 0, 1, ..."""
    found = {}
    for name, numbers in values.items():
        row, column = name.split("_")
        planned = Planned(of.row(row), of.column(column))
        by_seed = dict(enumerate(numbers))
        found[row, column] = Compared(planned, None, None, by_seed)
    return found


def test_ours_is_in_the_papers_unit_with_mean_deviation_and_difference():
    one = compared(Planned(ROW, COLUMN), {0: 0.88, 2: 0.90}, (0, 1, 2), 86.54)
    assert one.mean == pytest.approx(89.0)
    assert one.deviation == pytest.approx(2**0.5)
    assert one.difference == pytest.approx(-0.68)
    assert (one.paper, one.other, one.missing) == (89.68, 86.54, (1,))


def test_a_single_seed_has_no_deviation_and_none_has_no_mean():
    single = compared(Planned(ROW, COLUMN), {0: 0.88}, (0,), None)
    assert (single.mean, single.deviation) == (pytest.approx(88), None)
    empty = compared(Planned(ROW, COLUMN), {}, (0,), None)
    assert (empty.mean, empty.deviation, empty.difference, empty.short) == (None, None, None, 0)


@pytest.mark.parametrize(
    ("ours", "other", "better", "short"),
    [
        (88.0, None, "higher", 1.68),
        (88.0, 86.0, "higher", 0.0),  # above the other paper, but nearer to this one: see below
        (90.0, None, "higher", 0.0),
        (90.0, None, "lower", 0.32),
        (86.0, 86.54, "higher", 0.54),
        (80.0, None, "neither", 0.0),
    ],
)
def test_how_much_is_missing_to_the_nearer_paper(ours, other, better, short):
    metric = attrs.evolve(ACCURACY, better=better, scale=1.0)
    planned = Planned(ROW, attrs.evolve(COLUMN, metric=metric))
    one = compared(planned, {0: ours}, (0,), other)
    if (ours, other) == (88.0, 86.0):
        short = 1.68  # 1.68 to this paper, 2.00 to the other
    assert one.short == pytest.approx(short)
    assert one.is_exception is (short > 1)


def test_a_claim_is_checked_seed_by_seed_with_students_interval():
    of = table()
    found = cells(of, a_one=[3, 5, 6], b_one=[1, 2, 6], c_one=[1, 4, 2])
    checked = check(Claim("", "one", ("a",), ("b", "c"), "one"), of, found)
    gaps = [3 - 1, 5 - 3, 6 - 4]
    assert checked.difference == pytest.approx(2.0)
    assert checked.half_width == pytest.approx(0.0, abs=1e-12)
    assert (checked.verdict, checked.seeds) == ("seen", 3)
    spread = check(Claim("", "one", ("a",), ("b",), "one"), of, found)
    gaps = [2, 3, 0]
    interval = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert spread.difference == pytest.approx(5 / 3)
    assert spread.half_width == pytest.approx((interval.high - interval.low) / 2)
    assert spread.verdict == "not distinguishable"


def test_lower_is_better_where_the_metric_says_so():
    of = table("lower")
    found = cells(of, a_one=[1, 2, 3], b_one=[2, 3, 4.1])
    checked = check(Claim("", "one", ("a",), ("b",), "one"), of, found)
    assert checked.difference > 0
    assert checked.verdict == "seen"
    assert check(Claim("", "one", ("b",), ("a",), "one"), of, found).verdict.startswith("not seen")


def test_a_row_may_be_compared_with_itself_in_another_column():
    of = table()
    found = cells(of, a_one=[1, 1, 1], a_two=[0, 0.1, 0.2])
    checked = check(Claim("", "one", ("a",), (), "two"), of, found)
    assert checked.difference == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("within", "verdict"), [(2.0, "seen"), (1.05, "undecided"), (0.1, "not seen")]
)
def test_alike_needs_the_whole_interval_within_the_bound(within, verdict):
    of = table()
    found = cells(of, a_one=[1, 1.1, 0.9], b_one=[0, 0, 0])  # 1.00 +- 0.25
    claim = Claim("", "one", ("a",), ("b",), "one", alike=True, within=within)
    assert check(claim, of, found).verdict == verdict


def test_a_claim_needs_all_of_its_cells_and_two_common_seeds():
    of = table()
    claim = Claim("", "one", ("a",), ("b",), "one")
    assert check(claim, of, cells(of, a_one=[1, 2])).verdict == "not run"
    assert check(claim, of, cells(of, a_one=[1, 2], b_one=[1])).verdict == "needs two seeds"


def test_numbers_of_data_of_another_kind_are_not_compared():
    one = compared(Planned(ROW, COLUMN, comparable=False), {0: 0.5}, (0,), 86.54)
    assert (one.mean, one.paper, one.other) == (50.0, 89.68, 86.54)
    assert (one.difference, one.nearer, one.is_exception) == (None, None, False)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_decides_no_claim(value):
    of = table()
    found = cells(of, a_one=[value, 2, 3], b_one=[1, 1, 1])
    for alike in (False, True):
        checked = check(Claim("", "one", ("a",), ("b",), "one", alike, 1.0), of, found)
        assert (checked.difference, checked.half_width, checked.seeds) == (None, None, 3)
        assert checked.verdict == "a value is not finite"
