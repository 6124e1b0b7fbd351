"""Ditto: FedAvg, and a network per client, regularised towards the server's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bfl_baselines.personal import PersonalNetwork
from bflcore import Point, component, option
from bflcore.inference.memory import client_posterior, join_personal, keep_own
from bflcore.inference.point import descend, fit_points, objective

if TYPE_CHECKING:
    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = ["PulledNetwork"]


@component
class PulledNetwork(PersonalNetwork):
    """Train the shared network as in FedAvg, and a personal one regularised towards it."""

    name = "ditto"
    reference = "Li et al. 2021 (Ditto), Algorithm 1"

    pull: float = option(
        0.1, "strength of the quadratic penalty around the server's network (lambda)", at_least=0
    )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train w as in FedAvg, and v on f(v) + lambda/2 ||v - w_server||^2."""
        shared = fit_points(self, problem, broadcast, cohort)
        server = join_personal(problem, broadcast.start, cohort).mean
        v = client_posterior(problem, broadcast, cohort).mean
        pulled = self.replace(anchor=self.anchor + self.pull)
        v, _ = descend(self, problem, cohort, v, objective(pulled, problem, cohort, server))
        return attrs.evolve(shared, memory=keep_own(shared.memory, Point(v)))
