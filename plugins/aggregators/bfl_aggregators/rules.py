"""The numerics of the fusion rules, in the coordinates in which each of them is a sum.

Means are differences d from the prior's mean mu_0 throughout. A coordinate that some client knows
for certain (variance 0) is a limit: the certain clients decide it, by the weighted mean of theirs,
and its fused variance is 0. The two sums which that takes, ``certain`` and ``certain_shift``, are
there only where somebody is certain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bflcore import Gaussian, Posterior, Statistics
from bflcore.aggregation import weighted_sum

__all__ = [
    "consolidate",
    "consolidated_precision",
    "floored",
    "from_natural",
    "linear_pool_sums",
    "merge_linear_pools",
    "natural_sums",
    "normalise",
]

# A sum of precisions beyond this is looked at closely: near the end of float32's range d/s is not.
HUGE = 1e30


def natural_sums(weights: Tensor, shift: Tensor, variance: Tensor, *, exact: bool) -> Statistics:
    """Sum w/s and w d/s ``[B]`` over clients ``[K, B]``; w/s in float64 throughout if `exact`.

    Overwrites `shift`.
    """
    precision = (variance.double() if exact else variance).reciprocal()
    total = weighted_sum(weights, precision)
    if not bool((total < HUGE).all()):  # infinite, or 0 * infinity: some variance is zero
        return _natural_sums_where_certain(weights, shift.double(), variance.double())
    return {"precision": total, "shift": weighted_sum(weights, shift.div_(variance))}


def _natural_sums_where_certain(weights: Tensor, shift: Tensor, variance: Tensor) -> Statistics:
    """Sum the certain clients apart; in float64, where a tiny variance is not yet zero."""
    precision = variance.reciprocal()
    infinite = precision.isinf()
    precision.masked_fill_(infinite, 0.0)
    certain = infinite & (weights > 0)[:, None]
    return {
        "precision": weighted_sum(weights, precision),
        "shift": weighted_sum(weights, precision.mul_(shift)),
        "certain": weighted_sum(weights, certain.double()),
        "certain_shift": weighted_sum(weights, shift.masked_fill(~certain, 0.0)),
    }


def from_natural(total: Statistics, prior: Posterior, scale: Tensor) -> Gaussian:
    """Return N(mu_0 + sum(w d/s) / sum(w/s), scale / sum(w/s)), and the limits where certain."""
    dtype = prior.mean.dtype
    shift = total["shift"] / total["precision"]
    mean = _with_certain(shift, total).add_(prior.mean).to(dtype)
    del shift  # so that the server never holds more than four posteriors' worth
    return Gaussian(mean, _none_where_certain(scale / total["precision"], total).to(dtype))


def _with_certain(shift: Tensor, total: Statistics) -> Tensor:
    if "certain" not in total:
        return shift
    certain = total["certain"] > 0
    return torch.where(certain, total["certain_shift"] / total["certain"], shift)


def _none_where_certain(variance: Tensor, total: Statistics) -> Tensor:
    return variance.masked_fill_(total["certain"] > 0, 0.0) if "certain" in total else variance


def consolidated_precision(total: Statistics, prior: Gaussian) -> Tensor:
    """Return sum 1/s_k - (K - 1)/s_0 ``[P]``; minus infinity where only the prior is certain."""
    others = float(total["weight"]) - 1
    if not others:  # 0/0 where the prior is certain
        return total["precision"]
    return total["precision"] - others / prior.variance.double()


def floored(total: Statistics, prior: Gaussian, floor: float) -> Tensor:
    """Return where ``[P]`` the consolidated precision is at most `floor` times the prior's.

    A precision that is zero to the rounding of the sums is zero. One client is never floored.
    """
    if float(total["weight"]) == 1:
        return torch.zeros_like(total["precision"], dtype=torch.bool)
    least = (floor * (1 - 1e-9)) / prior.variance.double()
    least = least.nan_to_num(nan=0.0, posinf=float("inf")).maximum(1e-15 * total["precision"])
    low = consolidated_precision(total, prior) <= least
    return low & ~(total["certain"] > 0) if "certain" in total else low


def consolidate(total: Statistics, prior: Gaussian, floor: float) -> Gaussian:
    """Return the posterior in which the prior counts once.

    In differences from the prior's mean the subtracted (K - 1) mu_0/s_0 vanishes. A floored
    coordinate gets the prior's variance and the clients' precision-weighted mean: to divide by
    what little precision is left would throw its mean arbitrarily far.
    """
    dtype = prior.mean.dtype
    low = floored(total, prior, floor)
    precision = consolidated_precision(total, prior)
    shift = total["shift"] / torch.where(low, total["precision"], precision)
    variance = torch.where(low, prior.variance.double(), precision.reciprocal_())
    mean = _with_certain(shift, total).add_(prior.mean)
    return Gaussian(mean.to(dtype), _none_where_certain(variance, total).to(dtype))


def normalise(total: Statistics, prior: Posterior, power: int) -> Gaussian:
    """Divide the sum of means by sum w, and that of variances by (sum w)^power."""
    dtype = prior.mean.dtype
    mean = (total["mean"] / total["weight"]).add_(prior.mean).to(dtype)
    return Gaussian(mean, (total["variance"] / total["weight"] ** power).to(dtype))


def linear_pool_sums(weights: Tensor, shift: Tensor, variance: Tensor) -> Statistics:
    """Sum w, w d, and w (s + (d - centre)^2) about the block's own centre.

    Differences are taken from the heaviest client before they are averaged, so that clients which
    agree give exactly none. (From any client would do, but for one of weight zero that is far
    from all others.) Overwrites `shift`.
    """
    weight, heaviest = weights.sum(), shift[weights.argmax()].clone()
    apart = shift.sub_(heaviest)
    moved = weighted_sum(weights, apart)
    if bool(weight > 0):
        apart.sub_((moved / weight).to(apart.dtype))
    spread = torch.addcmul(variance, apart, apart, out=apart)
    return {
        "weight": weight,
        "mean": moved.add_(heaviest.double() * weight),
        "variance": weighted_sum(weights, spread),
    }


def merge_linear_pools(left: Statistics, right: Statistics) -> Statistics:
    """Add two partial pools, and what the distance of their centres adds to the variance.

    Sums of squares about each part's own centre, unlike sums of squares about a common origin,
    keep variances that are tiny beside the squared distance to that origin.
    Chan, Golub & LeVeque 1983.
    """
    merged = {name: left[name] + right[name] for name in left}
    if bool(left["weight"] > 0) and bool(right["weight"] > 0):
        gap = (left["mean"] / left["weight"]).sub_(right["mean"] / right["weight"])
        share = left["weight"] * (right["weight"] / merged["weight"])
        merged["variance"].add_(gap.square_().mul_(share))
    return merged
