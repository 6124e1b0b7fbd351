"""Intervals and areas, against scipy and brute force."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from bflcore.report.intervals import coverage_band, half_width, selective_risk


def test_half_of_an_interval_is_scipys():
    values = np.random.default_rng(0).normal(3, 2, 7)
    low, high = scipy.stats.t.interval(0.95, 6, values.mean(), scipy.stats.sem(values))
    assert half_width(list(values)) == pytest.approx((high - low) / 2, rel=1e-9)
    assert half_width([1.0]) is None
    assert half_width([2.0, 2.0, 2.0]) == 0


@pytest.mark.parametrize("count", [1, 3, 10, 57, 250, 3000])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9, 0.99])
def test_the_band_of_a_share_is_the_binomial_quantiles(count, rate):
    low, high = scipy.stats.binom.ppf([0.025, 0.975], count, rate) / count
    band = coverage_band(count, rate)
    assert band[:2] == pytest.approx((low, high))
    counts, mass = np.arange(count + 1), scipy.stats.binom.pmf(np.arange(count + 1), count, rate)
    outside = mass[counts / count < low].sum(), mass[counts / count > high].sum()
    assert (band.below, band.above) == pytest.approx(outside, abs=1e-12)
    assert max(outside) <= 0.025


@pytest.mark.parametrize("count", [1, 10, 250, 3000])
@pytest.mark.parametrize(("calibrated", "first"), [(9, 9), (20, 19), (50, 46), (999, 900)])
def test_few_calibration_samples_widen_the_band_to_beta_binomial(count, calibrated, first):
    exact = scipy.stats.betabinom(count, first, calibrated + 1 - first)
    low, high = exact.ppf([0.025, 0.975]) / count
    band = coverage_band(count, 0.9, calibrated)
    assert band[:2] == pytest.approx((low, high))
    outside = exact.cdf(low * count - 0.5), exact.sf(high * count + 0.5)
    assert (band.below, band.above) == pytest.approx(outside, abs=1e-9)


def test_too_few_calibration_samples_have_sets_of_everything():
    for calibrated in (0, 8):
        assert coverage_band(100, 0.9, calibrated) == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_certain_outcome_has_a_band_without_width(rate):
    assert coverage_band(5, rate) == (rate, rate, 0.0, 0.0)


def brute_force(errors):
    """Return the mean of the error among the first i of the sorted samples, over all i."""
    return float(np.mean(np.cumsum(errors) / np.arange(1, len(errors) + 1)))


def curve(errors):
    n = len(errors)
    kept = np.arange(1, n + 1)
    return {"retained": list(kept / n), "accuracy": list(1 - np.cumsum(errors) / kept)}


def test_the_area_of_many_samples_is_the_mean_risk_and_the_best_ranking_has_no_excess():
    rng = np.random.default_rng(0)
    errors = rng.random(20_000) < np.linspace(0, 0.5, 20_000)
    area, excess = selective_risk(curve(errors))
    assert area == pytest.approx(brute_force(errors), abs=1e-3)
    best, none = selective_risk(curve(np.sort(errors)))
    assert best == pytest.approx(brute_force(np.sort(errors)), abs=1e-3)
    assert none == pytest.approx(0, abs=1e-4)
    assert excess == pytest.approx(area - best, abs=1e-4)


def test_a_model_that_cannot_rank_has_its_error_as_area():
    assert selective_risk({"retained": [1.0], "accuracy": [0.7]})[0] == pytest.approx(0.3)
    assert selective_risk({"retained": [1.0], "accuracy": [0.0]}) == pytest.approx((1.0, 0.0))
    assert selective_risk({"retained": [0.5, 1.0], "accuracy": [1.0, 1.0]}) == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_ties_are_the_limit_of_errors_spread_evenly(levels):
    """Of each level's curve, the area by quadrature on a fine grid."""
    counts = np.array([count for count, _ in levels], float)
    wrong = np.array([min(count, bad) for count, bad in levels], float)
    kept, errors = np.cumsum(counts) / counts.sum(), np.cumsum(wrong) / counts.sum()
    given_curve = {"retained": list(kept), "accuracy": list(1 - errors / kept)}
    grid = (np.arange(20_000) + 0.5) / 20_000
    risk = np.interp(grid, [0, *kept], [0, *errors]) / grid
    area, excess = selective_risk(given_curve)
    assert area == pytest.approx(risk.mean(), abs=2e-3)
    rates = wrong / counts
    if all(a <= b for a, b in pairwise(rates)):
        assert excess >= -1e-9
    assert math.isfinite(excess)
