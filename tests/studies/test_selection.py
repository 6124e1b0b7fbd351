"""The best cell is chosen on validation samples, and how sure that is is said."""

import math

import pytest
from scipy import stats

from bflcore import OptionError, RunError
from bflcore.studies.selection import choose

from .quick import results

A, B, C = [1.0, 1.2, 1.1], [0.7, 0.8, 0.9], [0.72, 0.79, 0.92]


def groups(metric="validation__nll", **values):
    return results(values, metric).groups


def test_the_lowest_loss_is_best_and_the_second_is_compared_by_pairs():
    found = choose(groups(a=A, b=B, c=C), "personal.nll")
    assert (found.best, found.second, found.metric) == ("b", "c", "validation.nll")
    expected = stats.ttest_rel(C, B)
    assert found.difference.p == pytest.approx(expected.pvalue)
    assert not found.distinguishable
    assert "b, 0.8000 (mean over 3 seeds); second: c, +0.0100 [-0.0" in str(found)
    assert "paired over seeds, 95 %: not distinguishable" in str(found)


def test_the_highest_accuracy_is_best_and_may_be_distinguishable():
    found = choose(groups("validation__accuracy", a=A, b=B), "personal.accuracy")
    assert (found.best, found.distinguishable) == ("a", True)
    assert str(found).endswith("95 %: distinguishable")


def test_cells_that_miss_a_seed_are_left_out_by_name():
    found = choose(groups(a=A, b=B[:2]), "personal.nll")
    assert (found.best, found.second, found.left_out) == ("a", "", ("b",))
    assert "not compared, as runs are missing or not finite: b" in str(found)
    for odd in (math.nan, math.inf, -math.inf):
        assert choose(groups(a=A, b=[*B[:2], odd]), "personal.nll").left_out == ("b",)
    with pytest.raises(RunError, match="no cell has a finite validation.nll of all seeds"):
        choose(groups(a=[1.0, math.nan]), "personal.nll")


def test_a_single_seed_decides_nothing():
    found = choose(groups(a=[1.0], b=[2.0]), "personal.nll")
    assert (found.best, found.distinguishable) == ("a", False)
    assert "from a single seed it cannot be said whether they differ" in str(found)


def test_a_choice_on_test_data_says_so():
    found = choose(groups("personal__nll", a=A, b=B), "personal.nll", "test")
    assert (found.best, found.metric) == ("b", "personal.nll")
    assert "chosen on test data: these figures are optimistic" in str(found)
    assert found.as_json()["distinguishable"] is True


def test_without_validation_samples_nothing_is_chosen():
    with pytest.raises(RunError, match="run again with --validation-fraction"):
        choose(groups("personal__nll", a=A), "personal.nll")
    with pytest.raises(OptionError, match="unknown metric of --select 'validation.nll'"):
        choose(groups("validation__accuracy", a=A), "personal.nll")
