"""Eq. 11 of BPFed: the transmitted copy follows the local posterior along the KL term alone.

Each client keeps a local copy v of the prior of the shared coordinates. After a step of the
posterior q on Q_i (eq. 10), v takes steps on KL(q || v), q held fixed; v is then the anchor of the
next step on Q_i, and what the client transmits at the end of the round. This is the server-bound
model of pFedBayes (Zhang et al. 2022, Algorithm 1), from which the paper takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bflcore import Gaussian
from bflcore.inference.gradient import Optimiser, steps
from bflcore.inference.variational import fit_gaussians, prior_of_cohort

if TYPE_CHECKING:
    from bfl_bpfed.plugin import ReinforcedVariational
    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = ["fit"]


def fit(
    inference: ReinforcedVariational, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Fit every client of the cohort and return what eq. 11 transmits."""
    if not inference.reinforce_steps:
        return fit_gaussians(inference, problem, broadcast, cohort)
    prior = prior_of_cohort(inference, problem, broadcast, cohort)
    copy = Reinforcement(inference, problem, broadcast, cohort, prior)
    fitted = fit_gaussians(
        inference, problem, broadcast, cohort, after_step=copy.follow, anchor=copy.anchor
    )
    return attrs.evolve(fitted, posterior=copy.anchor.split(problem.layout)[0])


class Reinforcement:
    """The local copies v of a cohort, ``[K, P]``, and how they follow q."""

    def __init__(
        self,
        inference: ReinforcedVariational,
        problem: Problem,
        broadcast: Broadcast,
        cohort: Cohort,
        prior: Gaussian,
    ) -> None:
        self.anchor = prior.map(torch.clone)
        self.shared = 1 - problem.layout.join(
            problem.initial.new_zeros(problem.layout.shared_total),
            problem.initial.new_ones(problem.layout.personal_total),
        )
        self.theta = torch.stack([prior.mean, prior.variance.log() / 2], dim=1)
        self.steps = inference.reinforce_steps
        taken = tuple(self.steps * n for n in steps(inference, cohort))
        pace = inference.reinforce_lr / inference.lr
        self.optimiser = Optimiser(inference, self.theta, taken, broadcast.round, pace)

    def follow(self, posterior: Tensor) -> None:
        """Move v along -d KL(q || v) / dv, given q as (mean, rho) ``[k, 2, P]``."""
        k = len(posterior)
        mean, variance = posterior[:, 0], (2 * posterior[:, 1]).exp()
        for _ in range(self.steps):
            self.optimiser.step(self._gradient(mean, variance, k) * self.shared)
        self.anchor.mean[:k] = self.theta[:k, 0]
        self.anchor.variance[:k] = (2 * self.theta[:k, 1]).exp()

    def _gradient(self, mean: Tensor, variance: Tensor, k: int) -> Tensor:
        # KL(q || v) = log s_v - log s_q + (s_q^2 + (mu_q - mu_v)^2) / (2 s_v^2) - 1/2
        # with s_v = exp(rho): d / d mu_v = (mu_v - mu_q) / s_v^2
        #                      d / d rho = 1 - (s_q^2 + (mu_q - mu_v)^2) / s_v^2
        shift = self.theta[:k, 0] - mean
        precision = (-2 * self.theta[:k, 1]).exp()
        d_rho = 1 - (variance + shift.square()) * precision
        return torch.stack([shift * precision, d_rho], dim=1)
