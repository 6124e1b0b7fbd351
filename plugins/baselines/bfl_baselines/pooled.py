"""Centralised training: all clients' samples in one place."""

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
    """Train on all clients' samples in one place: the bound that federation is measured by.

    Every client gives the same result, so one per round is enough (``--cohort 1``).
    """

    name = "pooled"
    reference = "the usual upper bound; Fischer et al. 2024, Table 1"
    expected_failures = MappingProxyType(
        {"no data gives the prior back": "a client without data trains on the others'"}
    )

    def check(self, problem: Problem) -> None:
        """Refuse personal parameters: there is one network."""
        if problem.layout.personal_total:
            raise OptionError(
                "--share: the inference pooled trains one network, which has no personal "
                "parameters; allowed: all"
            )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train as one client that holds everything."""
        pool = pretraining.pool_samples(problem, 1.0)
        memory = {name: tensor[:1] for name, tensor in cohort.memory.items()}
        everything = pool.cohort([SERVER], memory, cohort.round)
        result = fit_points(self, pool, broadcast, everything)
        same = result.select([0] * len(cohort.clients))
        return attrs.evolve(same, clients=cohort.clients, examples=torch.tensor(cohort.sizes))
