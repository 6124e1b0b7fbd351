"""The methods `pvi`, `pvi-damped` and `fedgvi`, their inference, and a robust loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_pvi.robust import GeneralisedCrossEntropy
from bfl_pvi.variational import VariationalSites
from bflcore import Continual, Equal, Method, ProductOfChanges, hookimpl

if TYPE_CHECKING:
    from bflcore import Likelihood, LocalInference


class PVI(Method):
    """Share a Gaussian that is the prior times a factor per client, each counted once."""

    name = "pvi"
    reference = "Bui et al. 2018; Ashman et al. 2022, Algorithm 1 (synchronous)"
    inference = VariationalSites(damping=0.2, prior_sigma=1.0, initial_sigma=0.1)
    aggregator = ProductOfChanges()
    weighting = Equal()
    hyper = Continual()


class PVIDamped(Method):
    """Make a part of each change, so that clients that change at the same time do not overshoot."""

    name = "pvi-damped"
    reference = PVI.reference
    inference = PVI.inference.replace(damping=0.1)
    aggregator = PVI.aggregator
    weighting = PVI.weighting
    hyper = PVI.hyper


class FedGVI(Method):
    """Count each client's data once, under a loss that wrong labels hardly move."""

    name = "fedgvi"
    reference = "Mildner et al. 2025, Algorithm 1"
    inference = PVIDamped.inference
    aggregator = PVI.aggregator
    weighting = PVI.weighting
    hyper = PVI.hyper
    likelihood = GeneralisedCrossEntropy()


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield mean-field variational inference against the cavity."""
    yield VariationalSites


@hookimpl
def bfl_likelihoods() -> Iterator[type[Likelihood]]:
    """Yield the robust loss."""
    yield GeneralisedCrossEntropy


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the three methods."""
    yield PVI
    yield PVIDamped
    yield FedGVI
