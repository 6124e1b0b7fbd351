"""Hyperparameter updates: what the next round's prior is (the M-step)."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import attrs

from bflcore.aggregation import Statistics, add_sums
from bflcore.inference.memory import COMMON
from bflcore.messages import Broadcast, within
from bflcore.options import Component, component, option
from bflcore.posteriors import Gaussian

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import LocalResult
    from bflcore.posteriors import Posterior

__all__ = ["Accumulate", "Continual", "EmpiricalBayes", "Fixed", "HyperUpdate"]

# Replaces a fused variance of zero in the prior (alpha of Chen et al. 2024, FedSI).
ZERO_VARIANCE = 1e-4
SMALLEST_VARIANCE = 1e-12  # of a pool


class HyperUpdate(Component, abc.ABC):
    """Base of hyperparameter updates.

    `summarise` returns what is summed over clients and `update` makes the next broadcast from the
    sums: the server never needs more than one client's result in memory.
    """

    kind: ClassVar[str] = "hyper"
    families: ClassVar[tuple[str, ...]] = ()  # posterior families it can update; empty: any
    known_tags = MappingProxyType(
        {
            "monotone": "sum_k w_k KL(q_k || prior) never rises (checked)",
            "carries-posterior": "the fused posterior is the next start and, unless a variance is "
            "0, the next prior (checked)",
        }
    )

    def summarise(self, result: LocalResult, weights: Tensor, broadcast: Broadcast) -> Statistics:
        """Return sums over the clients of `result` (weights ``[K]``).

        By default those of personal posteriors, where clients send them (see `state`).
        """
        fields = within(result.statistics, "personal.")
        if not fields:
            return {}
        origin = fields["mean"].new_zeros(fields["mean"].shape[1:])
        return {f"{COMMON}{n}": t for n, t in _moments(weights, fields, origin).items()}

    @abc.abstractmethod
    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Return the next round's broadcast; `total` is the sum of all `summarise`."""

    def state(self, broadcast: Broadcast, total: Statistics) -> dict[str, Tensor]:
        """Return what `hyper` holds in the next broadcast.

        Where clients sent their personal posteriors ``[K, P_personal]``, it also holds their linear
        pool ``[P_personal]``: the prior common to all clients that maximises the expected log prior
        (Chen et al. 2023, appendix eq. 34-35).
        """
        sums = within(total, COMMON)
        if not sums:
            return dict(broadcast.hyper)
        origin = broadcast.start.mean.new_zeros(sums["first"].shape)
        common = _pool(sums, origin, SMALLEST_VARIANCE)
        return {**broadcast.hyper, **common.pack(COMMON)}

    def after_pretraining(self, broadcast: Broadcast, learned: Posterior) -> Broadcast:
        """Return the first broadcast of a run that begins with pre-training.

        By default what was learned becomes start and prior; in the prior, variances of zero become
        `ZERO_VARIANCE`.
        """
        prior = _replace_zero_variances(learned, ZERO_VARIANCE)
        return attrs.evolve(broadcast, start=learned, prior=prior)


@component
class Fixed(HyperUpdate):
    """Keep the initial prior; training still starts from the fused posterior."""

    name = "fixed"
    reference = "Fischer et al. 2024, section on priors"
    families = ()  # any: priors are passed on

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Replace the start only."""
        state = self.state(broadcast, total)
        return Broadcast(broadcast.round + 1, fused, broadcast.prior, state)


@component
class Accumulate(HyperUpdate):
    """Keep the initial prior; add the clients' statistics to the server state.

    Every statistic is summed over the clients, unweighted, and added to the server's of the same
    name, which is broadcast: ``hyper[name] += sum_k statistics[name][k]``.
    """

    name = "accumulate"
    reference = "Karimireddy et al. 2020 (SCAFFOLD), Algorithm 1, lines 15-17"
    families = ()  # any: posteriors are passed on

    def summarise(self, result: LocalResult, weights: Tensor, broadcast: Broadcast) -> Statistics:
        """Sum every statistic ``[K, ...]`` over the clients."""
        return {name: tensor.sum(0) for name, tensor in result.statistics.items()}

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Replace the start and add the statistics."""
        hyper = add_sums(dict(broadcast.hyper), total)
        return Broadcast(broadcast.round + 1, fused, broadcast.prior, hyper)


@component
class Continual(HyperUpdate):
    """Make each round's fused posterior the next round's prior."""

    name = "continual"
    reference = "Chen et al. 2023 (BPFed), eq. 10; zero variances: Chen et al. 2024 (FedSI)"
    families = ("point", "gaussian", "dense-gaussian", "low-rank-gaussian")
    tags = frozenset({"carries-posterior"})

    zero_variance: float = option(
        ZERO_VARIANCE,
        "prior variance of coordinates whose fused variance is zero (alpha; 0 = left to the "
        "inference)",
        at_least=0,
    )

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Replace start and prior."""
        prior = _replace_zero_variances(fused, self.zero_variance)
        return Broadcast(broadcast.round + 1, fused, prior, self.state(broadcast, total))

    def after_pretraining(self, broadcast: Broadcast, learned: Posterior) -> Broadcast:
        """Replace start and prior, as after a round."""
        return attrs.evolve(self.update(broadcast, learned, {}), round=broadcast.round)


def _replace_zero_variances(posterior: Posterior, variance: float) -> Posterior:
    """Return the posterior with another variance where a Gaussian's is zero."""
    if isinstance(posterior, Gaussian) and bool((certain := posterior.variance == 0).any()):
        return Gaussian(posterior.mean, posterior.variance.masked_fill(certain, variance))
    return posterior


@component
class EmpiricalBayes(HyperUpdate):
    """Choose the prior that maximises the clients' expected log prior.

    The optimum is the linear pool: mean m = avg mu_k, variance avg(s_k + (mu_k - m)^2).
    """

    name = "empirical-bayes"
    reference = "Chen et al. 2023 (BPFed), appendix eq. 34-37"
    families = ("gaussian",)
    tags = frozenset({"monotone"})

    floor: float = option(SMALLEST_VARIANCE, "smallest prior variance", above=0)

    def summarise(self, result: LocalResult, weights: Tensor, broadcast: Broadcast) -> Statistics:
        """Sum w, w d and w (s + d^2) ``[P]``, where d = mu - prior mean."""
        sums = _moments(weights, result.posterior.pack(), broadcast.prior.mean)
        return {**super().summarise(result, weights, broadcast), **sums}

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Match the pool's moments."""
        prior = _pool(total, broadcast.prior.mean, self.floor)
        return Broadcast(broadcast.round + 1, fused, prior, self.state(broadcast, total))


def _moments(weights: Tensor, fields: Mapping[str, Tensor], origin: Tensor) -> Statistics:
    """Sum w, w d and w (s + d^2) over clients, where d = mean - origin."""
    first = second = origin.new_zeros(origin.shape).double()
    for w, mean, variance in zip(weights.tolist(), fields["mean"], fields["variance"], strict=True):
        shift = mean.double() - origin
        first = first.add(shift, alpha=w)
        second = second.add(shift.square_().add_(variance), alpha=w)
    return {"weight": weights.sum(), "first": first, "second": second}


def _pool(total: Statistics, origin: Tensor, floor: float) -> Gaussian:
    """Return the Gaussian with the moments of the mixture of the clients' posteriors."""
    shift = total["first"] / total["weight"]
    variance = (total["second"] / total["weight"] - shift.square()).clamp_min(floor)
    return Gaussian((origin + shift).to(origin.dtype), variance.to(origin.dtype))
