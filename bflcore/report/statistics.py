"""Paired comparisons: mean differences with Student-t intervals, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.lazy import lazy

if TYPE_CHECKING:
    from scipy import special
else:
    special = lazy("scipy.special")  # scipy.stats takes a second to import, this a tenth

__all__ = ["Difference", "deviation", "holm", "mean", "paired", "stratified"]

LEVEL = 0.95


@attrs.frozen
class Difference:
    """A mean difference with its 95 % confidence interval, and the p-value of no difference.

    `n` counts what was paired. Where the spread cannot be estimated, from a single pair, or a value
    is not finite, there is neither interval nor p-value.
    """

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    p: float | None = None


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    add = math.fsum if all(map(math.isfinite, values)) else sum  # the former refuses inf - inf
    return add(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample (n - 1); None of fewer than two finite values."""
    known = len(values) > 1 and all(map(math.isfinite, values))
    return math.sqrt(_variance(values)) if known else None


def paired(differences: Sequence[float]) -> Difference:
    """Compare pairs by their differences: Student's t with n - 1 degrees of freedom."""
    return stratified([differences])


def stratified(strata: Sequence[Sequence[float]]) -> Difference:
    """Compare pairs within strata: the mean over strata of their mean differences.

    The variance is the sum of the strata's, the degrees of freedom are Satterthwaite's
    (Satterthwaite 1946; Welch 1947): of a single stratum n - 1. Strata without pairs are left out.
    """
    filled = [stratum for stratum in strata if stratum]
    count, n = len(filled), sum(map(len, filled))
    centre = mean([mean(stratum) for stratum in filled])
    unknown = not math.isfinite(centre) or any(len(stratum) < 2 for stratum in filled)
    if unknown:
        return Difference(centre, n)
    shares = [_variance(stratum) / len(stratum) / count**2 for stratum in filled]
    error = math.sqrt(math.fsum(shares))
    if not error:
        return Difference(centre, n, centre, centre, float(centre == 0))
    within = zip(shares, filled, strict=True)
    freedom = error**4 / math.fsum(share**2 / (len(stratum) - 1) for share, stratum in within)
    reach = float(special.stdtrit(freedom, (1 + LEVEL) / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(centre) / error))
    return Difference(centre, n, centre - reach, centre + reach, p)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for testing all of them at once (Holm 1979), in the same order."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = highest
    return adjusted


def _variance(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
