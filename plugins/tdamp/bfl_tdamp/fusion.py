"""The normalised weighted geometric mean of Bernoulli-Gaussian posteriors, as sums.

Per group: q(w) ~ prod_k [rho_k N(w; mu_k, s_k) + (1 - rho_k) delta(w)]^{a_k}, sum a_k = 1
(Xu et al. 2024, eq. 11). Both components keep their form; the normaliser C of the Gaussian one
enters the odds:

    1/s = sum a_k / s_k,  mu = s sum a_k mu_k / s_k,  logit rho = sum a_k logit rho_k + log C,
    log C = sum over the group of [log s - sum a_k log s_k - sum a_k (mu_k - mu)^2 / s_k] / 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs

from bfl_tdamp.posterior import CERTAIN, NUMBERS, BernoulliGaussian
from bflcore import AdditiveAggregator, Posterior, Statistics, component
from bflcore.aggregation import weighted_sum
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["GeometricMean"]

CONSTANTS = ("centre", *NUMBERS)  # the same at all clients of a round


@component
class GeometricMean(AdditiveAggregator):
    """Fuse by the normalised weighted geometric mean of the posteriors.

    Precisions, precision-weighted means and log-odds are averaged; disagreement between clients
    lowers the odds of a group through the normaliser.
    """

    name = "geometric-mean"
    reference = (
        "Xu et al. 2024, eq. 11-14 (with the means and variances of eq. 14 in the right places)"
    )
    families = ("bernoulli-gaussian",)
    tags = frozenset({"pools", "additive"})

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w, w / s, w d / s, w log-odds and terms of the normaliser; d = mu - prior mu."""
        q, origin = cast("BernoulliGaussian", posteriors), cast("BernoulliGaussian", prior)
        w = weights.double()
        precision = 1 / q.slab_variance
        shift = q.slab_mean - origin.slab_mean
        normaliser = origin.per_group(q.slab_variance.log() + precision * shift.square())
        return {
            "weight": w.sum(),
            "precision": weighted_sum(w, precision),
            "shift": weighted_sum(w, precision * shift),
            "log_odds": weighted_sum(w, q.log_odds),
            "normaliser": weighted_sum(w, normaliser),
            **{name: weighted_sum(w, getattr(q, name).double()) for name in CONSTANTS},
        }

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights, and normalise."""
        origin, weight = cast("BernoulliGaussian", prior), total["weight"]
        variance = weight / total["precision"]
        shift = total["shift"] / total["precision"]
        log_c = 0.5 * (
            origin.per_group(variance.log() + shift.square() / variance)
            - total["normaliser"] / weight
        )
        log_odds = total["log_odds"] / weight
        # Groups that all clients keep for certain are not affected by disagreement.
        log_odds = torch.where(
            log_odds >= CERTAIN * (1 - 1e-6), log_odds, log_odds + log_c.clamp_max(0)
        )
        fused = attrs.evolve(
            origin,
            slab_mean=origin.slab_mean + shift,
            slab_variance=variance,
            log_odds=log_odds.clamp(-CERTAIN, CERTAIN),
            **{name: total[name] / weight for name in CONSTANTS},
        )
        dtype = origin.slab_mean.dtype
        return fused.map(lambda tensor: tensor.to(dtype))
