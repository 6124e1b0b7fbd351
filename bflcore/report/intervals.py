"""Intervals of means and of shares, and the area under a selective-risk curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["coverage_band", "half_width", "selective_risk", "student"]

SMALL = (12.7062, 4.3027, 3.1824, 2.7764)  # 97.5 % quantiles of Student's t, 1 to 4 degrees
Z = 1.959964  # that of the normal distribution
TAIL = 0.025  # outside a 95 % band, on each side


def student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    Reference: Abramowitz & Stegun 1964, 26.7.5, from 5 degrees of freedom on.
    """
    if degrees <= len(SMALL):
        return SMALL[degrees - 1]
    terms: tuple[float, ...] = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean; None of fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    spread = sum((value - mean) ** 2 for value in values)
    return student(count - 1) * math.sqrt(spread / (count - 1) / count)


def coverage_band(count: int, rate: float, calibrated: int = 0) -> tuple[float, float]:
    """Return the shares between which 95 % of clients with `count` test samples are covered.

    Without `calibrated` the coverage is the `rate`, and the number of covered samples binomial. The
    sets of a client that calibrates with n samples of its own have a coverage that is
    Beta(k, n + 1 - k) distributed, k = ceil(rate (n + 1)), and the number is beta-binomial (Vovk
    2012); with k > n the sets hold everything.
    """
    first = math.ceil(rate * (calibrated + 1) - 1e-9)
    if calibrated and first > calibrated:
        return 1.0, 1.0
    below, lower = 0.0, 0
    for covered in range(count + 1):
        if calibrated:
            below += _beta_binomial(covered, count, first, calibrated + 1 - first)
        else:
            below += _binomial(covered, count, rate)
        if below < TAIL:
            lower = covered + 1
        if below >= 1 - TAIL:
            return lower / count, covered / count
    return lower / count, 1.0


def _binomial(covered: int, count: int, rate: float) -> float:
    if rate in {0.0, 1.0}:
        return float(covered == count * rate)
    odds = covered * math.log(rate) + (count - covered) * math.log1p(-rate)
    return math.exp(_log_ways(covered, count) + odds)


def _beta_binomial(covered: int, count: int, a: float, b: float) -> float:
    ratio = _log_beta(covered + a, count - covered + b) - _log_beta(a, b)
    return math.exp(_log_ways(covered, count) + ratio)


def _log_ways(chosen: int, count: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def selective_risk(curve: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the area under the curve of error over coverage (AURC), and its excess.

    `curve` is a retention curve: the accuracies of the fractions `retained`, which are the most
    certain samples. Samples between two fractions are equally certain: errors are spread evenly
    among them. The excess is over a ranking that puts all errors last, as good as possible.
    Reference: Geifman & El-Yaniv 2017; excess: Geifman, Uziel & El-Yaniv 2019, eq. 5.
    """
    area = before = errors = 0.0
    for kept, accuracy in zip(curve["retained"], curve["accuracy"], strict=True):
        found = kept * (1 - accuracy)
        rate = (found - errors) / (kept - before)
        # The error at coverage c is (errors + rate (c - before)) / c.
        area += rate * (kept - before)
        if before:
            area += (errors - rate * before) * math.log(kept / before)
        before, errors = kept, found
    best = errors + (1 - errors) * math.log1p(-errors) if errors < 1 else 1.0
    return area, area - best
