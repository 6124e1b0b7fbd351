"""Rules that multiply densities: precisions 1/s add up.

q_k = N(mu_k, s_k) for every parameter, with weights w_k; formulas in docstrings assume weights that
sum to one. Differences d = mu - mu_0 from the prior's mean are summed. A parameter with variance 0
at some client is a limiting case: its fused mean is the weighted mean over the clients with
variance 0, and its fused variance is 0. The two sums that this takes, ``certain`` and
``certain_shift``, are present only if some variance is 0.

Of other families whose densities multiply (`ExponentialFamily`), natural parameters are summed:
``natural.NAME``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bfl_aggregators.pools import PAPER, moments
from bflcore import ExponentialFamily, Gaussian, Posterior, Statistics, component, option
from bflcore.aggregation import CoordinatewiseAggregator, State, weighted_sum
from bflcore.inference.sites import exact_natural
from bflcore.lazy import lazy
from bflcore.messages import within

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = [
    "Conflation",
    "LogLinearPool",
    "NaturalAggregator",
    "WeightConsolidation",
    "WeightedConflation",
]

# Larger sums of precisions are computed with care: d/s overflows near the end of float32's range.
HUGE = 1e30


class NaturalAggregator(CoordinatewiseAggregator):
    """Base of rules that add precisions; clients with variance 0 decide (see the module)."""

    families = ("gaussian", "dense-gaussian")

    exact: ClassVar[bool] = False  # sum precisions in full: some will be subtracted again

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w, w/s and w d/s, or w times natural parameters (w = 1 if weights are ignored)."""
        w = weights if self.weighs else torch.ones_like(weights)
        if not isinstance(posteriors, Gaussian):
            return {"weight": w.sum(), **_sum_natural(w, posteriors)}
        d, s = moments(posteriors, prior)
        precision = s.reciprocal()
        total = _sum_exactly(w, precision) if self.exact else weighted_sum(w, precision)
        if bool((total < HUGE).all()):
            shift = weighted_sum(w, d.mul_(precision))
            return {"weight": w.sum(), "precision": total, "shift": shift}
        # Infinite, or 0 * infinity: some variance is zero.
        return {"weight": w.sum(), **_sum_where_certain(w, d.double(), s.double())}


@component
class LogLinearPool(NaturalAggregator):
    """Fuse as the weighted geometric mean of the densities.

    precision = sum w/s, mean = sum(w mu/s) / precision.
    """

    name = "log-linear-pool"
    aliases = ("llp",)
    reference = f"{PAPER} (LLP); Koliander et al. 2022"
    tags = frozenset({"pools", "additive", "keeps-variance", "narrow", "adds-precision"})

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor | None:
        """Return each client's share of all precision ``[K, P]``; None with correlations."""
        return _shares(posteriors, weights)

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide natural parameters by the sum of weights."""
        if not isinstance(prior, Gaussian):
            return _product(total, prior, 1 / total["weight"])
        mean = total["shift"] / total["precision"]
        return _gaussian(mean, total["weight"] / total["precision"], total, prior)


@component
class Conflation(NaturalAggregator):
    """Fuse as the product of the densities, as for independent measurements of one quantity.

    precision = sum 1/s, mean = sum(mu/s) / precision. Weights are ignored.
    """

    name = "conflation"
    reference = f"{PAPER}; Hill & Miller 2011"
    tags = frozenset({"adds-evidence", "additive", "shrinks-variance", "narrow", "adds-precision"})
    weighs = False
    ignores_weights_because = "every client's evidence counts in full"

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor | None:
        """Return each client's share of all precision ``[K, P]``; None with correlations."""
        return _shares(posteriors, torch.ones_like(weights))

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Turn natural parameters into moments."""
        if not isinstance(prior, Gaussian):
            return _product(total, prior)
        mean = total["shift"] / total["precision"]
        return _gaussian(mean, 1 / total["precision"], total, prior)


@component
class WeightedConflation(NaturalAggregator):
    """Fuse as the product of the densities, each to the power w over the largest w.

    precision = sum(w/s) / max w, mean = sum(w mu/s) / sum(w/s).
    """

    name = "weighted-conflation"
    aliases = ("wc",)
    reference = f"{PAPER} (WC); Hill & Miller 2011"
    tags = frozenset({"pools", "additive", "shrinks-variance", "narrow", "adds-precision"})

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor | None:
        """Return each client's share of all precision ``[K, P]``; None with correlations."""
        return _shares(posteriors, weights)

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Compute the largest weight in addition to the sums."""
        return {"heaviest": weights.max(), **super().encode(posteriors, weights, prior)}

    def combine(self, left: Statistics, right: Statistics) -> Statistics:
        """Add the sums and keep the larger of the two largest weights."""
        heaviest = left["heaviest"].maximum(right["heaviest"])
        return {**super().combine(left, right), "heaviest": heaviest}

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide precisions by the largest weight."""
        if not isinstance(prior, Gaussian):
            return _product(total, prior, 1 / total["heaviest"])
        mean = total["shift"] / total["precision"]
        return _gaussian(mean, total["heaviest"] / total["precision"], total, prior)


@component
class WeightConsolidation(NaturalAggregator):
    """Multiply the densities and divide by all but one of the priors they share.

    precision = sum 1/s - (K - 1)/s_0, mean = (sum mu/s - (K - 1) mu_0/s_0) / precision: exact Bayes
    for conjugate models. Weights are ignored. Parameters whose precision does not exceed the
    floor get the prior's variance and the clients' precision-weighted mean; the report counts them.
    A precision matrix has no floor: a product that is not positive definite is refused.
    """

    name = "weight-consolidation"
    aliases = ("dwc",)
    reference = f"{PAPER} (DWC); McClure et al. 2018"
    tags = frozenset({"adds-evidence", "additive", "subtracts-prior", "adds-precision"})
    weighs = False
    ignores_weights_because = "every client's evidence counts in full"
    exact = True

    floor: float = option(
        0.0,
        "lower bound on the fused precision, as a fraction of the prior's (1 = data never lower "
        "the precision, as in exact Bayes)",
        at_least=0,
        at_most=1,
    )

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor | None:
        """Return each client's precision in units of the fused one ``[K, P]``.

        None with correlations.
        """
        if not isinstance(posteriors, Gaussian):
            return None
        fused = self.fuse(posteriors, weights, prior)
        assert isinstance(fused, Gaussian), "as is what this rule gives"  # noqa: S101
        share = fused.variance.double() / posteriors.variance.double()
        return share.nan_to_num(1.0, posinf=1.0)

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Subtract the prior K - 1 times.

        The term (K - 1) mu_0/s_0 vanishes in differences from the prior's mean. The mean of a
        floored parameter is not divided by its precision, which may be close to zero.
        """
        if not isinstance(prior, Gaussian):
            return _product(total, prior, priors=float(total["weight"]) - 1)
        precision, low = self._subtract(total, prior)
        mean = total["shift"] / torch.where(low, total["precision"], precision)
        variance = torch.where(low, prior.variance, precision.reciprocal())
        return _gaussian(mean, variance, total, prior)

    def report(self, state: State) -> dict[str, float]:
        """Return how many parameters were floored."""
        if not isinstance(state.prior, Gaussian):
            return {}
        low = (self._subtract(chunk.tensors, chunk.prior)[1].sum() for _, chunk in state.chunks())
        return {"floored": float(sum(low))}

    def _subtract(self, total: Statistics, prior: Posterior) -> tuple[Tensor, Tensor]:
        """Return sum 1/s_k - (K - 1)/s_0 ``[P]``, and a mask where it does not exceed the floor.

        A precision within rounding error of zero counts as zero. A single client is never floored,
        nor are parameters that have variance 0 at some client.
        """
        assert isinstance(prior, Gaussian), "the registry admits no other family"  # noqa: S101
        clients = float(total["weight"])
        if clients == 1:  # and 0/0 where the prior is certain
            return total["precision"], torch.zeros_like(total["precision"], dtype=torch.bool)
        once = prior.variance.double().reciprocal()
        least = total["precision"] * (4 * torch.finfo(prior.variance.dtype).eps)
        if self.floor:
            least = least.maximum(once * (self.floor * (1 - 1e-9)))
        precision = total["precision"] - once.mul_(clients - 1)
        low = precision <= least
        return precision, low & ~(total["certain"] > 0) if "certain" in total else low


def _gaussian(shift: Tensor, variance: Tensor, total: Statistics, prior: Posterior) -> Gaussian:
    """Return N(mu_0 + shift, variance), or its limit where some client has variance 0."""
    if "certain" in total:
        certain = total["certain"] > 0
        shift = torch.where(certain, total["certain_shift"] / total["certain"], shift)
        variance = variance.masked_fill(certain, 0.0)
    return Gaussian(shift + prior.mean, variance)


def _sum_natural(weights: Tensor, posteriors: Posterior) -> Statistics:
    """Return sum_k w_k eta_k by natural parameter, one client at a time: matrices may be large."""
    total: Statistics = {}
    for row, weight in enumerate(weights.tolist()):
        for name, tensor in exact_natural(posteriors[row]).items():
            if name in total:
                total[name].add_(tensor, alpha=weight)
            else:
                total[name] = tensor.mul(weight)
    return {f"natural.{name}": tensor for name, tensor in total.items()}


def _product(
    total: Statistics, prior: Posterior, power: Tensor | float = 1.0, priors: float = 0.0
) -> Posterior:
    """Return the product of the densities to a `power`, divided by some `priors`."""
    assert isinstance(prior, ExponentialFamily), "the registry admits no other family"  # noqa: S101
    shared = exact_natural(prior)
    summed = within(total, "natural.")
    return prior.with_natural({n: power * t - priors * shared[n] for n, t in summed.items()})


def _sum_exactly(weights: Tensor, values: Tensor) -> Tensor:
    """Return sum_k w_k values_k in float64, from sums of eight clients in the dtype of `values`.

    About as exact as a conversion of all values to float64, and four times as fast.
    """
    weights, groups = weights.to(values.dtype), len(values) // 8
    whole = 8 * groups
    eights = weights[:whole].view(groups, 1, 8) @ values[:whole].view(groups, 8, values.shape[1])
    return eights.sum((0, 1), dtype=torch.float64).add_(weights[whole:] @ values[whole:])


def _sum_where_certain(weights: Tensor, shift: Tensor, variance: Tensor) -> Statistics:
    """Sum clients with variance 0 separately, in float64, so that tiny variances are not zero."""
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


def _shares(posteriors: Posterior, weights: Tensor) -> Tensor | None:
    """Return w_k/s_k over its sum ``[K, P]`` in float64; 1 where somebody is certain.

    None for a family with correlations, where a client moves other parameters, too.
    """
    if not isinstance(posteriors, Gaussian):
        return None
    precision = weights.double()[:, None] / posteriors.variance.double()
    certain = (posteriors.variance == 0).any(0)
    return (precision / precision.sum(0)).masked_fill(certain, 1.0)
