"""The M-step: prior, target sparsity, noise variance (Xu et al. 2024, section III-C)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import attrs

from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian
from bflcore import Broadcast, HyperUpdate, component, option
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from bflcore import LocalResult, Posterior, Statistics
else:
    np, torch = lazy("numpy"), lazy("torch")

__all__ = ["EMGroupSparse", "balance", "best_noise", "cut", "loss_without", "prune"]

TINY = 1e-30  # so that 0 / 0 gives 0
NOISE = (1e-3, 1e3)  # bounds on the noise variance of a classification
SMALLEST = 1e-6  # lower bound on the noise variance of a regression
PROBABLE = 0.99  # probability from which a group counts as needed (rho_th)
EULER = 0.5772156649
# F(m) = argmax_v E log Phi(-x / sqrt v) for a minimum Gumbel x with location m and scale 1. It is
# infinite from Euler's constant on: beyond the last location the noise is not updated.
LOCATIONS = (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5)
BEST = (
    *(3.724e-4, 1.0201e-3, 2.8096e-3, 7.8156e-3, 0.022142, 0.0649, 0.20324, 0.37615, 0.73288),
    *(1.5547, 3.8666, 6.0403, 10.251, 19.983, 51.148, 101.32, 280.49),
)


@component
class EMGroupSparse(HyperUpdate):
    """Make the fused posterior the prior, reach the target sparsity, and update the noise."""

    name = "em-group-sparse"
    reference = "Xu et al. 2024, section III-C and Algorithm 2"
    families = ("bernoulli-gaussian",)

    target: float = option(
        1.0, "final fraction of the groups of weights that are kept", above=0, at_most=1
    )
    rho: float = option(
        0.9,
        "initial probability of the groups, if some are to be removed (rho_0)",
        above=0,
        below=1,
    )
    deadline: int = option(
        10, "number of rounds over which the other groups are gradually removed", at_least=1
    )
    rank: str = option(
        "saliency",
        "what decides which groups are kept: `saliency`, a few removed per round until the "
        "deadline, or `log-odds`, all removed at once when enough groups have probability 0.99",
        choices=("saliency", "log-odds"),
    )
    learn_noise: bool = option(True, "updates of the noise variance")

    def summarise(self, result: LocalResult, weights: Tensor, broadcast: Broadcast) -> Statistics:
        """Sum w and w times each moment of the residuals."""
        w = weights.double()
        moments = {name: (w * tensor.double()).sum() for name, tensor in result.statistics.items()}
        return {"weight": w.sum(), **moments}

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Return the next start and prior; the prior keeps its initial variances (see `Tdamp`)."""
        q = cast("BernoulliGaussian", fused)
        if self.learn_noise:
            moments = {name: float(t / total["weight"]) for name, t in total.items()}
            noise = _update_noise(float(q.noise), moments)
            q = attrs.evolve(q, noise=torch.full_like(q.noise, noise))
        first = cast("BernoulliGaussian", broadcast.prior).slab_variance
        if self.target < 1 and self.rank == "log-odds":
            q = cut(self, q)
        elif self.target < 1:
            q = prune(self, q, balance(q, loss_without(q, first)), broadcast.round + 1)
        prior = attrs.evolve(q, slab_variance=first)
        return Broadcast(broadcast.round + 1, q, prior, broadcast.hyper)


def loss_without(q: BernoulliGaussian, first: Tensor) -> Tensor:
    """Return the increase of the loss without each group ``[G]``, in nats: sum of Lambda mu^2 / 2.

    Lambda is the precision that the data, counted once, add to `first` ``[P]`` (the saliency of
    LeCun et al. 1990, eq. 5). Log-odds also rank the groups, but many end at +-50.
    """
    data = 1 / q.once(first).slab_variance - 1 / first
    return 0.5 * q.per_group(q.slab_mean.square() * data)


def balance(q: BernoulliGaussian, loss: Tensor) -> Tensor:
    """Divide each group's `loss` ``[G]`` by the root of the mean over kept groups of its matrix.

    Each of many redundant inputs has a small loss: by the plain loss, a matrix of them may lose
    nearly all its groups. By the loss divided by the mean, a matrix of few groups would.
    """
    kept = q.log_odds > -CERTAIN
    scaled = [
        losses / losses[alive].mean().clamp_min(TINY).sqrt() if bool(alive.any()) else losses
        for losses, alive in zip(q.by_matrix(loss), q.by_matrix(kept), strict=True)
    ]
    return torch.cat(scaled)


def prune(
    hyper: EMGroupSparse, q: BernoulliGaussian, loss: Tensor, rounds: int
) -> BernoulliGaussian:
    """Reset the odds of certain groups, then remove those with the least `loss` ``[G]``.

    After `rounds` rounds the fraction target^(rounds / deadline) is left, and from the deadline on
    exactly the target, for good. Groups that the data removed return only then, and only if too few
    are left.
    """
    log_odds, target = q.log_odds, round(hyper.target * q.log_odds.numel())
    left = int((log_odds > 0).sum())
    if bool((log_odds.abs() >= CERTAIN).all()):
        if left == target:
            return q
        if left > target:
            opened = math.log(hyper.rho / (1 - hyper.rho))
            log_odds = log_odds.masked_fill(log_odds > 0, opened)
    late = rounds >= hyper.deadline
    share = hyper.target ** (rounds / hyper.deadline)
    count = target if late else round(share * log_odds.numel())
    rank = loss - (loss.max() + 1) * (log_odds <= -CERTAIN)
    kept = torch.zeros_like(log_odds, dtype=torch.bool)
    kept[rank.topk(count).indices] = True
    fate = torch.full_like(log_odds, CERTAIN) if late else log_odds
    return attrs.evolve(q, log_odds=torch.where(kept, fate, -CERTAIN))


def cut(hyper: EMGroupSparse, q: BernoulliGaussian) -> BernoulliGaussian:
    """Keep the groups of the largest odds once more than the target are probable (Xu et al. 2024).

    "More than the target" counts probabilities above 0.99 (rho_th). The kept groups start again at
    probability rho; the others are removed for good. The paper keeps every probable group and may
    overshoot; this keeps exactly the target.
    """
    target = round(hyper.target * q.log_odds.numel())
    if int((q.probability > PROBABLE).sum()) <= target:
        return q
    kept = torch.full_like(q.log_odds, -CERTAIN)
    kept[q.log_odds.topk(target).indices] = math.log(hyper.rho / (1 - hyper.rho))
    return attrs.evolve(q, log_odds=kept)


def _update_noise(noise: float, moments: dict[str, float]) -> float:
    """Return the noise variance that fits the residuals of the last sweep.

    Regression: E (y - z)^2. Classification: a minimum Gumbel, density exp(t - e^t) of
    t = (x - alpha)/beta, is fitted to x = z_c - z_y; the noise goes halfway to its best variance.
    """
    if "residual" in moments:
        return min(max(moments["residual"], SMALLEST), NOISE[1])
    spread = moments["margin_square"] - moments["margin"] ** 2
    if spread <= 0:
        return noise
    beta = math.sqrt(6 * spread) / math.pi
    best = best_noise((moments["margin"] + EULER * beta) / beta)
    if best is None:
        return noise
    return min(max(0.5 * beta**2 * best + 0.5 * noise, NOISE[0]), NOISE[1])


def best_noise(location: float) -> float | None:
    """Return F(location), log-linearly interpolated; None where it is infinite."""
    if location > LOCATIONS[-1]:
        return None
    return float(np.exp(np.interp(location, LOCATIONS, np.log(BEST))))
