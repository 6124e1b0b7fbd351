"""The normalised weighted geometric mean of Bernoulli-Gaussian posteriors, as sums.

Per group: q(w) ~ prod_k [rho_k N(w; mu_k, s_k) + (1 - rho_k) delta(w)]^{a_k}, sum a_k = 1
(Xu et al. 2024, eq. 11). Both parts keep their form; the Gaussian part's normaliser C enters the
odds:

    1/s = sum a_k / s_k,  mu = s sum a_k mu_k / s_k,  logit rho = sum a_k logit rho_k + log C,
    log C = sum over the group of [log s - sum a_k log s_k - sum a_k (mu_k - mu)^2 / s_k] / 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from bfl_tdamp.message_passing import own
from bfl_tdamp.posterior import CERTAIN, NUMBERS, BernoulliGaussian
from bflcore.aggregation import weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Posterior, Statistics

CONSTANTS = ("centre", *NUMBERS)  # the same at every client that takes part

__all__ = ["decode", "encode"]


def encode(posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
    """Return the sums over clients; means as differences d from the prior's."""
    q, origin, w = own(posteriors), own(prior), weights.double()
    precision = 1 / q.slab_variance
    shift = q.slab_mean - origin.slab_mean
    normaliser = origin.per_group(q.slab_variance.log() + precision * shift.square())
    constants = {name: getattr(own(posteriors), name).double() for name in CONSTANTS}
    return {
        "weight": w.sum(),
        "precision": weighted_sum(w, precision),
        "shift": weighted_sum(w, precision * shift),
        "log_odds": weighted_sum(w, q.log_odds),
        "normaliser": weighted_sum(w, normaliser),
        **{name: weighted_sum(w, tensor) for name, tensor in constants.items()},
    }


def decode(total: Statistics, prior: Posterior) -> BernoulliGaussian:
    """Return the fused posterior in the prior's dtype."""
    origin, weight = own(prior), total["weight"]
    variance = weight / total["precision"]
    shift = total["shift"] / total["precision"]
    constants = {name: total[name] / weight for name in CONSTANTS}
    log_c = 0.5 * (
        origin.per_group(variance.log() + shift.square() / variance) - total["normaliser"] / weight
    )
    log_odds = total["log_odds"] / weight
    # What every client holds for certain is not up for disagreement.
    log_odds = torch.where(
        log_odds >= CERTAIN * (1 - 1e-6), log_odds, log_odds + log_c.clamp_max(0)
    )
    fused = attrs.evolve(
        origin,
        slab_mean=origin.slab_mean + shift,
        slab_variance=variance,
        log_odds=log_odds.clamp(-CERTAIN, CERTAIN),
        **constants,
    )
    dtype = origin.slab_mean.dtype
    return fused.map(lambda tensor: tensor.to(dtype))
