"""The method `em-tdamp` and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_tdamp.posterior import BernoulliGaussian
from bfl_tdamp.tdamp import Tdamp
from bflcore import (
    AdditiveAggregator,
    Aggregator,
    Broadcast,
    HyperUpdate,
    LocalInference,
    Method,
    Posterior,
    component,
    hookimpl,
    option,
)

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import LocalResult, Statistics


@component
class GeometricMean(AdditiveAggregator):
    """Fuse by the normalised weighted geometric mean of the posteriors.

    Precisions, precision-weighted means and log-odds are averaged; where clients disagree, the
    normaliser lowers the odds of a group.
    """

    name = "geometric-mean"
    reference = "Xu et al. 2024, eq. 11-14 (with means and variances of eq. 14 in their places)"
    families = ("bernoulli-gaussian",)
    tags = frozenset({"pools", "additive"})

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w, w / s, w d / s, w log-odds and the normalisers' terms; d = mu - prior mu."""
        from bfl_tdamp import fusion

        return fusion.encode(posteriors, weights, prior)

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the weights and normalise."""
        from bfl_tdamp import fusion

        return fusion.decode(total, prior)


@component
class EMGroupSparse(HyperUpdate):
    """Make the fused posterior the prior, reach the target sparsity, and update the noise."""

    name = "em-group-sparse"
    reference = "Xu et al. 2024, section III-C and Algorithm 2"
    families = ("bernoulli-gaussian",)

    target: float = option(
        1.0, "share of the groups of weights that are kept in the end", above=0, at_most=1
    )
    rho: float = option(
        0.9,
        "first probability of the groups, where some are to be removed (rho_0)",
        above=0,
        below=1,
    )
    deadline: int = option(
        10, "rounds over which the other groups are removed, few at a time", at_least=1
    )
    learn_noise: bool = option(True, "update the noise variance")

    def summarise(self, result: LocalResult, weights: Tensor, broadcast: Broadcast) -> Statistics:
        """Sum w and w times the residuals' moments."""
        from bfl_tdamp import em

        return em.summarise(result, weights)

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Return the next start and prior."""
        from bfl_tdamp import em

        return em.update(self, broadcast, fused, total)


class EMTdamp(Method):
    """Learn a group-sparse network by message passing and expectation maximisation."""

    name = "em-tdamp"
    reference = "Xu, Liu, Zhang & Lau 2024, Algorithms 1 and 2"
    inference = "tdamp"
    aggregator = "geometric-mean"
    weighting = "examples"
    hyper = "em-group-sparse"


@hookimpl
def bfl_posteriors() -> Iterator[type[Posterior]]:
    """Yield the family of group-sparse Gaussians."""
    yield BernoulliGaussian


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield message passing."""
    yield Tdamp


@hookimpl
def bfl_aggregators() -> Iterator[type[Aggregator]]:
    """Yield the geometric mean."""
    yield GeometricMean


@hookimpl
def bfl_hyper_updates() -> Iterator[type[HyperUpdate]]:
    """Yield the M-step."""
    yield EMGroupSparse


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield EM-TDAMP."""
    yield EMTdamp
