"""Fusion rules, weightings and Monte-Carlo dropout: Fischer et al. 2024; order statistics."""

from __future__ import annotations

from collections.abc import Iterator

from bfl_aggregators.dropout import MCDropout
from bfl_aggregators.pools import PAPER, LinearPool, WeightedSum
from bfl_aggregators.products import (
    Conflation,
    LogLinearPool,
    WeightConsolidation,
    WeightedConflation,
)
from bfl_aggregators.robust import (
    GeometricMedian,
    Median,
    TrimmedMean,
    TrimmedPrecisionWeightedMean,
)
from bfl_aggregators.weightings import Distance, MaxDiscrepancy
from bflcore import (
    AdditiveAggregator,
    Aggregator,
    LocalInference,
    Method,
    Weighting,
    hookimpl,
)


class MCDropoutMethod(Method):
    """Train a shared network with dropout by federated averaging; predict by averaging masks."""

    name = "mc-dropout"
    reference = PAPER
    inference = MCDropout()


RULES: tuple[type[AdditiveAggregator], ...] = (
    WeightedSum,
    LinearPool,
    LogLinearPool,
    Conflation,
    WeightedConflation,
    WeightConsolidation,
)


@hookimpl
def bfl_aggregators() -> Iterator[type[Aggregator]]:
    """Yield the additive rules and the robust ones."""
    yield from RULES
    yield from (Median, TrimmedMean, GeometricMedian, TrimmedPrecisionWeightedMean)


@hookimpl
def bfl_weightings() -> Iterator[type[Weighting]]:
    """Yield the weightings that depend on divergences."""
    yield from (MaxDiscrepancy, Distance)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield Monte-Carlo dropout."""
    yield MCDropout


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method of the same name."""
    yield MCDropoutMethod
