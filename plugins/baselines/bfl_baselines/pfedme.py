"""pFedMe: the shared network minimises the Moreau envelopes of the clients' losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bfl_baselines.personal import PersonalNetwork
from bflcore import Point, component, option
from bflcore.inference.gradient import batches, mean_loss, steps
from bflcore.inference.memory import OwnPosterior, client_posterior, join_personal, local_result
from bflcore.inference.point import objective
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient
else:
    torch = lazy("torch")

__all__ = ["MoreauEnvelope"]


@component
class MoreauEnvelope(PersonalNetwork):
    """Minimise the Moreau envelope F of the loss f; clients predict with theta(w).

    F(w) = min over theta of f(theta) + lambda/2 ||theta - w||^2, with minimiser theta(w) and
    gradient lambda (w - theta(w)).
    """

    name = "pfedme"
    reference = "Dinh, Tran & Nguyen 2020 (pFedMe), Algorithm 1"

    pull: float = option(
        15.0, "strength of the quadratic penalty around the shared network (lambda)", above=0
    )
    inner_steps: int = option(
        5, "gradient steps per minibatch to approximate theta (K)", at_least=1
    )
    personal_lr: float = option(0.05, "learning rate of these steps", above=0)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Alternate between theta(w) on a minibatch and a gradient step of w on the envelope.

        theta starts from w in each round and, on a minibatch, from where the last one left it.
        """
        w = join_personal(problem, broadcast.start, cohort).mean.clone()  # [K, P]
        theta = torch.where(  # [K, P]; a client without samples keeps the theta that it has
            w.new_tensor(cohort.sizes)[:, None] > 0,
            w,
            client_posterior(problem, broadcast, cohort).mean,
        )
        loss_and_gradient = objective(
            self, problem, cohort, self.centre(problem, broadcast, cohort)
        )
        rule = self.update_rule(w, cohort)
        total = w.new_zeros(len(w))
        for batch in batches(self, cohort):
            k = len(batch.sizes)
            theta[:k], loss = self._minimise(loss_and_gradient, theta[:k], w[:k], batch)
            rule.step(self.pull * (w[:k] - theta[:k]))
            total[:k] += loss
        kept = OwnPosterior(own=Point(theta), started=w.new_ones(len(w)))
        loss = mean_loss(total, steps(self, cohort))
        return local_result(problem, cohort, Point(w), loss, memory=kept)

    def _minimise(
        self, loss_and_gradient: LossAndGradient, theta: Tensor, w: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Approximate theta(w) ``[k, P]`` by `inner_steps` steps from `theta` ``[k, P]``.

        Returns it and the losses ``[k]`` of the last step.
        """
        loss = w.new_zeros(len(w))
        for _ in range(self.inner_steps):
            loss, gradient = loss_and_gradient(theta, batch)
            gradient = gradient.add(theta - w, alpha=self.pull)
            theta = theta.sub(gradient, alpha=self.personal_lr)
        return theta, loss
