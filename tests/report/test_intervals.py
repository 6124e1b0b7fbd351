"""Intervals, against scipy."""

import numpy as np
import pytest
import scipy.stats

from bflcore.report.intervals import coverage_band, half_width


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
