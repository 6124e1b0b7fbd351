"""Rules that average: the weighted sum and the linear pool.

q_k = N(mu_k, s_k) for every parameter, with weights w_k; formulas in docstrings assume weights that
sum to one. Differences d = mu - mu_0 from the prior's mean are summed, since squares of means would
cancel in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore import Gaussian, Posterior, Statistics, component
from bflcore.aggregation import CoordinatewiseAggregator, add_sums, weighted_sum
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["PAPER", "LinearPool", "WeightedSum", "moments"]

PAPER = "Fischer, Orescanin, Loomis & McClure 2024"


def moments(posteriors: Posterior, prior: Posterior) -> tuple[Tensor, Tensor]:
    """Return d = mu - mu_0 and s ``[K, P]`` of Gaussians; d is a new tensor."""
    assert isinstance(posteriors, Gaussian), "the registry admits no other family"  # noqa: S101
    return posteriors.mean - prior.mean, posteriors.variance


@component
class WeightedSum(CoordinatewiseAggregator):
    """Fuse as the weighted sum of independent random variables.

    mean = sum w mu, variance = sum w^2 s.
    """

    name = "weighted-sum"
    aliases = ("ws",)
    reference = f"{PAPER} (WS)"
    families = ("gaussian",)
    tags = frozenset({"pools", "additive", "shrinks-variance", "narrow"})

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor:
        """Return each client's share of all weight ``[K, P]``."""
        return (weights.double() / weights.double().sum())[:, None].expand(posteriors.mean.shape)

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w, w d and w^2 s."""
        d, s = moments(posteriors, prior)
        return {
            "weight": weights.sum(),
            "mean": weighted_sum(weights, d),
            "variance": weighted_sum(weights.square(), s),
        }

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights and by its square."""
        mean = total["mean"] / total["weight"] + prior.mean
        return Gaussian(mean, total["variance"] / total["weight"] ** 2)


@component
class LinearPool(CoordinatewiseAggregator):
    """Fuse as the Gaussian with the moments of the mixture of the clients' posteriors.

    mean = sum w mu, variance = sum w s + sum w (mu_k - mean)^2.
    """

    name = "linear-pool"
    aliases = ("lp",)
    reference = f"{PAPER} (LP); Koliander et al. 2022"
    families = ("gaussian",)
    tags = frozenset({"pools", "additive", "keeps-variance", "mixture"})

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor:
        """Return each client's share of all weight ``[K, P]``."""
        return (weights.double() / weights.double().sum())[:, None].expand(posteriors.mean.shape)

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w, w d, and w (s + (d - centre)^2) about the weighted mean of these clients.

        The heaviest client is subtracted before averaging, so that the spread of clients that agree
        is exactly zero. (A client of weight zero might be far from all others.)
        """
        d, s = moments(posteriors, prior)
        weight, heaviest = weights.sum(), d[weights.argmax()].clone()
        apart = d.sub_(heaviest)
        moved = weighted_sum(weights, apart)
        if bool(weight > 0):
            apart.sub_((moved / weight).to(apart.dtype))
        spread = torch.addcmul(s, apart, apart, out=apart)
        return {
            "weight": weight,
            "mean": moved.add_(heaviest.double() * weight),
            "variance": weighted_sum(weights, spread),
        }

    def combine(self, left: Statistics, right: Statistics) -> Statistics:
        """Add the sums, and the squared distance between the two centres to the variance.

        Sums of squares about separate centres, unlike those about a common origin, preserve
        variances that are tiny compared with the squared distance to that origin (Chan, Golub &
        LeVeque 1983).
        """
        combined = add_sums(left, right)
        if bool(left["weight"] > 0) and bool(right["weight"] > 0):
            gap = (left["mean"] / left["weight"]).sub_(right["mean"] / right["weight"])
            share = left["weight"] * (right["weight"] / combined["weight"])
            combined["variance"].add_(gap.square_().mul_(share))
        return combined

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights."""
        mean = total["mean"] / total["weight"] + prior.mean
        return Gaussian(mean, total["variance"] / total["weight"])
