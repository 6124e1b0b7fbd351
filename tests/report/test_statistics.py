"""Paired comparisons agree with scipy, Holm's adjustment with his procedure."""

import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from bflcore.report.statistics import Difference, deviation, holm, mean, paired, stratified

values = st.floats(-1, 1).map(lambda x: round(x, 3))
samples = st.lists(values, min_size=2, max_size=12)


@given(samples)
def test_a_paired_comparison_is_scipys_t_test(differences):
    assume(len(set(differences)) > 1)
    found, expected = paired(differences), stats.ttest_1samp(differences, 0)
    interval = expected.confidence_interval(0.95)
    assert found.n == len(differences)
    assert math.isclose(found.p, expected.pvalue, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(found.low, interval.low, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(found.high, interval.high, rel_tol=1e-9, abs_tol=1e-12)


@given(samples, samples)
def test_two_strata_are_compared_as_by_welchs_test(first, second):
    # The sum of two means is the difference of the first and the negated second.
    assume(len(set(first)) > 1 and len(set(second)) > 1)
    expected = stats.ttest_ind(first, [-value for value in second], equal_var=False)
    interval = expected.confidence_interval(0.95)
    found = stratified([first, [], second])
    assert found.n == len(first) + len(second)
    assert math.isclose(found.p, expected.pvalue, rel_tol=1e-8, abs_tol=1e-12)
    assert math.isclose(2 * found.low, interval.low, rel_tol=1e-8, abs_tol=1e-10)
    assert math.isclose(2 * found.high, interval.high, rel_tol=1e-8, abs_tol=1e-10)


@given(samples)
def test_an_interval_contains_zero_where_the_p_value_says_so(differences):
    found = paired(differences)
    assert (found.low <= 0 <= found.high) == (found.p >= 0.05)


def test_equal_differences_leave_no_doubt():
    assert paired([0.5, 0.5]) == Difference(0.5, 2, 0.5, 0.5, 0.0)
    assert paired([0.0, 0.0, 0.0]) == Difference(0.0, 3, 0.0, 0.0, 1.0)


def test_a_single_pair_has_no_interval():
    assert paired([0.3]) == Difference(0.3, 1)
    assert stratified([[0.1, 0.2], [0.3]]) == Difference(pytest.approx(0.225), 3)


def rejected(p_values, level):
    """Return which hypotheses Holm's procedure rejects, step by step."""
    found = set()
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for step, i in enumerate(order):
        if p_values[i] > level / (len(p_values) - step):
            break
        found.add(i)
    return found


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.999))
def test_adjusted_p_values_reject_what_holms_procedure_rejects(p_values, level):
    adjusted = holm(p_values)
    near = [abs(p - level) < 1e-9 for p in adjusted]
    assume(not any(near))
    assert {i for i, p in enumerate(adjusted) if p <= level} == rejected(p_values, level)
    assert all(new >= old for new, old in zip(adjusted, p_values, strict=True))


@given(samples)
def test_mean_and_deviation_are_those_of_a_sample(found):
    assert math.isclose(mean(found), statistics.mean(found), abs_tol=1e-12)
    assert math.isclose(deviation(found), statistics.stdev(found), rel_tol=1e-9, abs_tol=1e-12)


def test_what_is_not_finite_has_neither_deviation_nor_interval():
    for odd in ([1.0, math.nan], [math.inf, -math.inf, 1.0]):
        assert math.isnan(mean(odd))
        assert deviation(odd) is None
        assert paired(odd).p is None
    assert deviation([1.0]) is None
    assert math.isnan(mean([]))
