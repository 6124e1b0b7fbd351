"""BPFed's inference: a Gaussian posterior, and a copy of the prior that follows it.

Each client keeps a local copy v of the prior. After each step of the posterior q on Q_i (eq. 10), v
takes steps on KL(q || v) with q fixed (eq. 11), and is the prior in the next step of q. At the end
of the round the client sends v's shared half, which corresponds to the localised global model of
pFedBayes (Zhang et al. 2022, Algorithm 1), and keeps its personal half as its own (Algorithm 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore import Gaussian, VariationalInference, component, option
from bflcore.inference.gradient import Optimiser, Trainable, steps, trainable_mask
from bflcore.inference.memory import Memory
from bflcore.inference.variational import fit_gaussians, prior_of_cohort
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem
else:
    torch = lazy("torch")

__all__ = ["FollowingPrior", "PriorCopy", "ReinforcedVariational"]


@component
class FollowingPrior(VariationalInference):
    """Base of inferences with a copy of the prior that follows the posterior."""

    reinforce_lr: float = option(1e-3, "learning rate of the copy of the prior", above=0)

    def prior_copy(
        self,
        problem: Problem,
        broadcast: Broadcast,
        cohort: Cohort,
        copy_steps: int,
        following: Trainable = "shared",
    ) -> PriorCopy:
        """Return the copies v ``[K, P]``; they start at the prior, and take `copy_steps` at a time.

        Only the parameters `following` of v change.
        """
        v = prior_of_cohort(self, problem, broadcast, cohort).map(torch.clone)
        theta = torch.stack([v.mean, v.variance.log() / 2], dim=1)
        taken = tuple(copy_steps * n for n in steps(self, cohort))
        lr = self.reinforce_lr / self.lr * self.lr_at(cohort.round)  # decays like that of q
        rule = Optimiser(theta, taken, self.optimiser, lr, self.momentum)
        return PriorCopy(v, theta, rule, copy_steps, trainable_mask(problem, following))


@component
class ReinforcedVariational(FollowingPrior):
    """Fit a mean-field Gaussian; send a copy of the prior that follows it (eq. 11).

    The copy of the personal parameters stays with the client, which predicts with it. It follows
    where it continues the client's own posterior, that is with ``personal_prior = previous``. With
    ``reinforce_steps = 0`` the fitted posterior itself is sent and kept.
    """

    name = "reinforced-variational"
    reference = "Chen et al. 2023 (BPFed), eq. 7, 10, 11; Zhang et al. 2022 (pFedBayes), Alg. 1"

    reinforce_steps: int = option(
        0, "steps of the copy of the prior on the KL term after each local step", at_least=0
    )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Minimise Q_i (eq. 10) while the copy of the prior follows (eq. 11)."""
        if not self.reinforce_steps:
            return fit_gaussians(self, problem, broadcast, cohort)
        own = self.personal_prior == "previous"
        copy = self.prior_copy(
            problem, broadcast, cohort, self.reinforce_steps, "all" if own else "shared"
        )
        fitted = fit_gaussians(
            self, problem, broadcast, cohort, after_step=copy.follow, anchor=copy.v
        )
        shared, personal = copy.v.split(problem.layout)
        memory = {**fitted.memory, **Memory(personal=personal).pack()} if own else fitted.memory
        return attrs.evolve(fitted, posterior=shared, memory=memory)


@attrs.frozen(eq=False)
class PriorCopy:
    """A cohort's copies v of the prior; `follow` changes them in place.

    `v` ``[K, P]`` is the prior in the KL term of q. `optimiser` updates `theta` ``[K, 2, P]``, the
    mean and rho = log sigma of v, `steps` times per step of q, where `mask` ``[P]`` is 1.
    """

    v: Gaussian
    theta: Tensor
    optimiser: Optimiser
    steps: int
    mask: Tensor | None

    def follow(self, q: Tensor) -> None:
        """Take steps of v on KL(q || v), given q as (mean, rho) ``[k, 2, P]``."""
        k = len(q)
        mean, variance = q[:, 0], (2 * q[:, 1]).exp()
        for _ in range(self.steps):
            gradient = self._gradient(mean, variance, k)
            self.optimiser.step(gradient if self.mask is None else gradient * self.mask)
        self.v.mean[:k] = self.theta[:k, 0]
        self.v.variance[:k] = (2 * self.theta[:k, 1]).exp()

    def _gradient(self, mean: Tensor, variance: Tensor, k: int) -> Tensor:
        # KL(q || v) = log s_v - log s_q + (s_q^2 + (mu_q - mu_v)^2) / (2 s_v^2) - 1/2
        # with s_v = exp(rho): d / d mu_v = (mu_v - mu_q) / s_v^2
        #                      d / d rho = 1 - (s_q^2 + (mu_q - mu_v)^2) / s_v^2
        shift = self.theta[:k, 0] - mean
        precision = (-2 * self.theta[:k, 1]).exp()
        d_rho = 1 - (variance + shift.square()) * precision
        return torch.stack([shift * precision, d_rho], dim=1)
