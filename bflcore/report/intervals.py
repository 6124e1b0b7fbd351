"""Intervals of means and of shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bflcore.lazy import lazy
from bflcore.report.statistics import paired

if TYPE_CHECKING:
    import numpy as np
    from scipy import special
else:
    np = lazy("numpy")
    special = lazy("scipy.special")

__all__ = ["Band", "coverage_band", "half_width"]

TAIL = 0.025  # outside a 95 % band, on each side


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean; None of fewer than two values."""
    found = paired(values)
    return None if found.high is None else found.high - found.mean


class Band(NamedTuple):
    """Where 95 % of shares are to be expected, and the probabilities of shares outside."""

    low: float
    high: float
    below: float
    above: float


def coverage_band(count: int, rate: float, calibrated: int | None = None) -> Band:
    """Return the shares between which 95 % of clients with `count` test samples are covered.

    Without `calibrated` the coverage is the `rate`, and the number of covered samples binomial. The
    sets of a client that calibrates with n samples of its own have a coverage that is
    Beta(k, n + 1 - k) distributed, k = ceil(rate (n + 1)), and the number is beta-binomial (Vovk
    2012); with k > n the sets hold everything. As numbers are whole, fewer than 5 % are outside.
    """
    covered = np.arange(count + 1)
    if calibrated is None:
        until = special.bdtr(covered, count, rate)
    else:
        a = math.ceil(rate * (calibrated + 1) - 1e-9)
        b = calibrated + 1 - a
        if not b:
            return Band(1.0, 1.0, 0.0, 0.0)
        ways = -math.log(count + 1) - special.betaln(covered + 1, count - covered + 1)
        mass = ways + special.betaln(covered + a, count - covered + b) - special.betaln(a, b)
        until = np.cumsum(np.exp(mass))
    low, high = np.searchsorted(until, [TAIL, 1 - TAIL])
    high = min(high, count)
    below = until[low - 1] if low else 0.0
    return Band(low / count, high / count, float(below), max(0.0, 1 - float(until[high])))
