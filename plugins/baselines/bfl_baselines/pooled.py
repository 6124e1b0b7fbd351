"""Centralised training on the pooled samples of all clients."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from bflcore import OptionError, PointInference, component
from bflcore.inference.point import fit_points
from bflcore.lazy import lazy
from bflcore.randomness import SERVER

if TYPE_CHECKING:
    import torch

    from bflcore import Broadcast, Cohort, LocalResult, Problem
    from bflcore.experiments import pretraining
else:
    pretraining = lazy("bflcore.experiments.pretraining")
    torch = lazy("torch")

__all__ = ["Pooled"]


@component
class Pooled(PointInference):
    """Train on the pooled samples of all clients: an upper bound for federated training.

    All clients return the same result, so one per round is enough (``--cohort 1``).
    """

    name = "pooled"
    reference = "the usual upper bound; Fischer et al. 2024, Table 1"
    tags = frozenset({"pools-samples"})
    expected_failures = MappingProxyType(
        {"no data gives the prior back": "a client without data trains on the others'"}
    )

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` if there are personal parameters."""
        if problem.layout.personal_total:
            raise OptionError(
                "--share: inference pooled trains a single network without personal parameters; "
                "allowed: all"
            )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train as one client that holds all samples."""
        pool = pretraining.pool_samples(problem, 1.0)
        memory = {name: tensor[:1] for name, tensor in cohort.memory.items()}
        everything = pool.cohort([SERVER], memory, cohort.round)
        result = fit_points(self, pool.for_client(everything), broadcast, everything)
        same = result.select([0] * len(cohort.clients))
        return attrs.evolve(same, clients=cohort.clients, examples=torch.tensor(cohort.sizes))
