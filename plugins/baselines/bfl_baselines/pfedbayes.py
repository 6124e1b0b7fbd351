"""pFedBayes: a personal Gaussian per client, and a shared one that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bfl_bpfed.bpfed import FollowingPrior
from bflcore import Gaussian, component, option
from bflcore.inference.memory import Memory, OwnPosterior, keep_own

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = ["PersonalBayes"]


@component
class PersonalBayes(FollowingPrior):
    """Fit a personal Gaussian with the shared one as prior; the shared one follows it."""

    name = "pfedbayes"
    reference = "Zhang et al. 2022 (pFedBayes), Algorithm 1"

    reinforce_steps: int = option(
        1, "steps of the shared Gaussian on the KL term after each local step", at_least=0
    )

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client that does not have a personal Gaussian yet."""
        none_yet = OwnPosterior.empty(self.initial(problem))
        return {**super().initial_memory(problem), **none_yet.pack()}

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Take steps of q on NLL + zeta KL(q || w), each followed by steps of w on KL(q || w)."""
        fitted, w = self.fit_and_follow(problem, broadcast, cohort, self.reinforce_steps)
        q, personal = fitted.posterior, Memory.unpack(fitted.memory, Gaussian).personal
        if personal is not None:
            q = q.join(personal, problem.layout)
        shared = w.split(problem.layout)[0]
        return attrs.evolve(fitted, posterior=shared, memory=keep_own(fitted.memory, q))

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Train novel clients as in a round, without sending anything."""
        return self.fit(problem, broadcast, cohort).memory if cohort.novel else cohort.memory
