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
    "from_natural",
    "linear_pool_sums",
    "merge_linear_pools",
    "natural_sums",
    "normalise",
]

# A sum of precisions beyond this is looked at closely: near the end of float32's range d/s is not.
HUGE = 1e30


def natural_sums(weights: Tensor, shift: Tensor, variance: Tensor, *, exact: bool) -> Statistics:
    """Sum w/s and w d/s ``[B]`` over clients ``[K, B]``; overwrites `shift`.

    If `exact`, the sum of w/s is right to a few roundings of its terms, whatever K is.
    """
    precision = variance.reciprocal()
    total = _sum_exactly(weights, precision) if exact else weighted_sum(weights, precision)
    if not bool((total < HUGE).all()):  # infinite, or 0 * infinity: some variance is zero
        return _natural_sums_where_certain(weights, shift.double(), variance.double())
    return {"precision": total, "shift": weighted_sum(weights, shift.mul_(precision))}


def _sum_exactly(weights: Tensor, values: Tensor) -> Tensor:
    """Return sum_k w_k values_k in float64; at most eight at a time are added in `values`' dtype.

    About as exact as if all were converted to float64, and four times as fast.
    """
    weights, groups = weights.to(values.dtype), len(values) // 8
    whole = 8 * groups
    eights = weights[:whole].view(groups, 1, 8) @ values[:whole].view(groups, 8, values.shape[1])
    return eights.sum((0, 1), dtype=torch.float64).add_(weights[whole:] @ values[whole:])


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
    mean = _with_certain(total["shift"] / total["precision"], total) + prior.mean
    return Gaussian(mean, _none_where_certain(scale / total["precision"], total))


def _with_certain(shift: Tensor, total: Statistics) -> Tensor:
    if "certain" not in total:
        return shift
    certain = total["certain"] > 0
    return torch.where(certain, total["certain_shift"] / total["certain"], shift)


def _none_where_certain(variance: Tensor, total: Statistics) -> Tensor:
    return variance.masked_fill(total["certain"] > 0, 0.0) if "certain" in total else variance


def consolidated_precision(
    total: Statistics, prior: Gaussian, floor: float
) -> tuple[Tensor, Tensor]:
    """Return sum 1/s_k - (K - 1)/s_0 ``[B]``, and where it is at most `floor` times the prior's.

    A precision that is zero to the rounding of the sums is zero. One client is never floored, nor
    is what some client knows for certain.
    """
    clients = float(total["weight"])
    if clients == 1:  # and 0/0 where the prior is certain
        return total["precision"], torch.zeros_like(total["precision"], dtype=torch.bool)
    once = prior.variance.double().reciprocal()
    least = total["precision"] * (4 * torch.finfo(prior.variance.dtype).eps)
    if floor:
        least = least.maximum(once * (floor * (1 - 1e-9)))
    precision = total["precision"] - once.mul_(clients - 1)
    low = precision <= least
    return precision, low & ~(total["certain"] > 0) if "certain" in total else low


def consolidate(total: Statistics, prior: Gaussian, floor: float) -> Gaussian:
    """Return the posterior in which the prior counts once.

    In differences from the prior's mean the subtracted (K - 1) mu_0/s_0 vanishes. A floored
    coordinate gets the prior's variance and the clients' precision-weighted mean: to divide by
    what little precision is left would throw its mean arbitrarily far.
    """
    precision, low = consolidated_precision(total, prior, floor)
    shift = total["shift"] / torch.where(low, total["precision"], precision)
    variance = torch.where(low, prior.variance, precision.reciprocal())
    return Gaussian(_with_certain(shift, total) + prior.mean, _none_where_certain(variance, total))


def normalise(total: Statistics, prior: Posterior, power: int) -> Gaussian:
    """Divide the sum of means by sum w, and that of variances by (sum w)^power."""
    mean = total["mean"] / total["weight"] + prior.mean
    return Gaussian(mean, total["variance"] / total["weight"] ** power)


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
