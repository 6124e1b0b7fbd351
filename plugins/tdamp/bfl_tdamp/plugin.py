"""The method `em-tdamp` and its parts."""

from __future__ import annotations

from collections.abc import Iterator

from bfl_tdamp.em import EMGroupSparse
from bfl_tdamp.fusion import GeometricMean
from bfl_tdamp.posterior import BernoulliGaussian
from bfl_tdamp.tdamp import Tdamp
from bflcore import (
    Aggregator,
    HyperUpdate,
    LocalInference,
    Method,
    Posterior,
    hookimpl,
)


class EMTdamp(Method):
    """Learn a group-sparse network by message passing and expectation maximisation."""

    name = "em-tdamp"
    reference = "Xu, Liu, Zhang & Lau 2024, Algorithms 1 and 2"
    inference = Tdamp()
    aggregator = GeometricMean()
    hyper = EMGroupSparse()


class EMTdampPaper(Method):
    """Learn by message passing as printed, without the departures that `em-tdamp` makes.

    Kept are the corrections of misprints, Module B after Module A, Gaussian biases, and messages
    that are not carried from one minibatch to the next.
    """

    name = "em-tdamp-paper"
    reference = "Xu, Liu, Zhang & Lau 2024, Algorithms 1 and 2"
    inference = Tdamp(
        rho=0.9,
        forgetting=1.0,
        momentum=0.0,
        line_search=False,
        pooled=False,
        centred=False,
        output_scale=1.0,
        count_once=False,
    )
    aggregator = GeometricMean()
    hyper = EMGroupSparse(rank="log-odds")


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
    """Yield EM-TDAMP, and its printed form."""
    yield EMTdamp
    yield EMTdampPaper
