"""Fusion rules, weightings and Monte-Carlo dropout: Fischer et al. 2024; order statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from bfl_aggregators.pools import PAPER, LinearPool, WeightedSum
from bfl_aggregators.products import (
    Conflation,
    LogLinearPool,
    WeightConsolidation,
    WeightedConflation,
)
from bfl_aggregators.robust import Median, TrimmedMean
from bfl_aggregators.weightings import Distance, MaxDiscrepancy
from bflcore import (
    AdditiveAggregator,
    Aggregator,
    LocalInference,
    Method,
    PointInference,
    Weighting,
    component,
    hookimpl,
    option,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Cohort, Posterior, Predictive, Problem
    from bflcore.inference.gradient import Batch


@component
class MCDropout(PointInference):
    """Train a point estimate with dropout on hidden units, and keep dropout on to predict.

    Minimises what `map` does, each sample under its own mask; a prediction averages over masks.
    """

    name = "mc-dropout"
    reference = f"{PAPER} (dropout 0.2); Gal & Ghahramani 2016"

    rate: float = option(0.2, "probability that a hidden unit is dropped", at_least=0, below=1)
    predict_draws: int = option(10, "masks averaged in a prediction (S)", at_least=1)

    def check(self, problem: Problem) -> None:
        """Refuse a network without hidden units."""
        from bfl_aggregators import dropout

        dropout.check(problem)

    def gradient(
        self, problem: Problem, cohort: Cohort
    ) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        """Differentiate under fresh masks."""
        from bfl_aggregators import dropout

        return dropout.DropoutGradient(self, problem, cohort)

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Average predictions over masks."""
        from bfl_aggregators import dropout

        return dropout.predict(self, problem, posterior, memory, x, streams)


class MCDropoutMethod(Method):
    """Train one shared network with dropout by federated averaging; predict by its masks."""

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
    yield from (Median, TrimmedMean)


@hookimpl
def bfl_weightings() -> Iterator[type[Weighting]]:
    """Yield the weightings by divergence."""
    yield from (MaxDiscrepancy, Distance)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield Monte-Carlo dropout."""
    yield MCDropout


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method of the same name."""
    yield MCDropoutMethod
