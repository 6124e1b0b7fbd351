"""Intervals of means and of shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bflcore.lazy import lazy
from bflcore.report.statistics import paired

if TYPE_CHECKING:
    import numpy as np
    from scipy import special
else:
    np = lazy("numpy")
    special = lazy("scipy.special")

__all__ = ["coverage_band", "half_width"]

TAIL = 0.025  # outside a 95 % band, on each side


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean; None of fewer than two values."""
    found = paired(values)
    return None if found.high is None else found.high - found.mean


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
    covered = np.arange(count + 1)
    if calibrated:
        a, b = first, calibrated + 1 - first
        ways = -math.log(count + 1) - special.betaln(covered + 1, count - covered + 1)
        mass = ways + special.betaln(covered + a, count - covered + b) - special.betaln(a, b)
        below = np.cumsum(np.exp(mass))
    else:
        below = special.bdtr(covered, count, rate)
    lower, upper = np.searchsorted(below, [TAIL, 1 - TAIL])
    return float(lower) / count, float(min(upper, count)) / count
