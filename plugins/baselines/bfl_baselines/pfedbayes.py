"""pFedBayes: a personal Gaussian per client, and a shared one that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bfl_bpfed.bpfed import FollowingPrior
from bflcore import Gaussian, component, option
from bflcore.inference.gradient import batches, mean_loss, steps
from bflcore.inference.memory import OwnPosterior, client_posterior, local_result
from bflcore.inference.variational import Objective, mean_and_rho

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = ["PersonalBayes"]


@component
class PersonalBayes(FollowingPrior):
    """Fit a personal Gaussian with the shared one as prior; the shared one follows it.

    Clients keep the personal Gaussian q from round to round. The shared one, w, starts each round
    from the server's.
    """

    name = "pfedbayes"
    reference = "Zhang et al. 2022 (pFedBayes), Algorithm 1"

    personal_steps: int = option(
        5, "steps of the personal Gaussian per minibatch, each with new noise", at_least=1
    )

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client that does not have a personal Gaussian yet."""
        none_yet = OwnPosterior.empty(self.initial(problem))
        return {**super().initial_memory(problem), **none_yet.pack()}

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Per minibatch, take steps of q on NLL + zeta/n KL(q || w), then one of w on KL(q || w).

        For a client without q, q starts from the server's Gaussian.
        """
        start = client_posterior(problem, broadcast, cohort)
        assert isinstance(start, Gaussian), "the registry admits no other family"  # noqa: S101
        theta = mean_and_rho(start)  # of q [K, 2, P]
        w = self.prior_copy(problem, broadcast, cohort, copy_steps=1)
        objective = Objective(self, problem, cohort, anchor=w.v)
        optimiser = self.update_rule(theta, cohort)
        total = theta.new_zeros(len(theta))
        for batch in batches(self, cohort):
            k = len(batch.sizes)
            for _ in range(self.personal_steps):
                nll, gradient = objective(theta[:k], batch)
                optimiser.step(gradient)
                total[:k] += nll / self.personal_steps
            w.follow(theta[:k])
            objective.read_anchor()
        q = Gaussian(theta[:, 0], (2 * theta[:, 1]).exp())
        kept = OwnPosterior(own=q, started=theta.new_ones(len(theta)))
        loss = mean_loss(total, steps(self, cohort))
        fitted = local_result(problem, cohort, q, loss, memory=kept)
        return attrs.evolve(fitted, posterior=w.v.split(problem.layout)[0])

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Train novel clients as in a round, without sending anything."""
        return self.fit(problem, broadcast, cohort).memory if cohort.novel else cohort.memory
