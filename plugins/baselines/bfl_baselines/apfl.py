"""APFL: FedAvg, and a network per client, trained in a mixture with the shared network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bfl_baselines.personal import PersonalNetwork
from bflcore import Point, component, option
from bflcore.inference.gradient import batches, mean_loss, steps
from bflcore.inference.memory import OwnPosterior, join_personal, local_result
from bflcore.inference.point import objective
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem
else:
    torch = lazy("torch")

__all__ = ["AdaptiveMixture"]


@attrs.frozen(eq=False, kw_only=True)
class Mixture(OwnPosterior):
    """The memory of a client, which predicts with `own`, the mixture alpha v + (1 - alpha) w."""

    started: Tensor  # 1 if the client has v and the mixture, 0 before ``[]``
    v: Tensor  # the personal network ``[P]``
    alpha: Tensor  # the weight of v in the mixture ``[]``


@component
class AdaptiveMixture(PersonalNetwork):
    """Train the shared network as in FedAvg, and a personal one through their mixture."""

    name = "apfl"
    reference = "Deng, Kamani & Mahdavi 2020 (APFL), Algorithm 1 and eq. 10"

    alpha: float = option(
        0.5, "initial weight of the personal network in the mixture", at_least=0, at_most=1
    )
    adaptive: bool = option(
        True, "gradient step of alpha on the loss of the mixture, once per round"
    )
    alpha_lr: float = option(
        0.1, "learning rate of alpha (plain gradient descent, without lr_decay)", above=0
    )

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return a memory with the initial alpha and without v."""
        initial = problem.initial
        none_yet = Mixture(
            started=initial.new_zeros(()),
            v=torch.zeros_like(initial),
            alpha=initial.new_tensor(self.alpha),
        )
        return {**super().initial_memory(problem), **none_yet.pack()}

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train w on f(w) and v on f(alpha v + (1 - alpha) w).

        For a client without v, v starts from the server's network.
        """
        w = join_personal(problem, broadcast.start, cohort).mean.clone()  # [K, P]
        memory = Mixture.unpack(cohort.memory, Point)
        v = torch.where(memory.started[:, None] > 0, memory.v, w)  # [K, P]
        alpha = memory.alpha[:, None].clone()  # [K, 1]
        loss_and_gradient = objective(
            self, problem, cohort, self.centre(problem, broadcast, cohort)
        )
        rule_of_w, rule_of_v = self.update_rule(w, cohort), self.update_rule(v, cohort)
        total = w.new_zeros(len(w))
        for step, batch in enumerate(batches(self, cohort)):
            k = len(batch.sizes)
            _, of_mixture = loss_and_gradient(w[:k].lerp(v[:k], alpha[:k]), batch)
            if self.adaptive and step == 0:  # eq. 10: d mixture / d alpha = v - w
                of_alpha = ((v[:k] - w[:k]) * of_mixture).sum(1, keepdim=True)
                alpha[:k] = (alpha[:k] - self.alpha_lr * of_alpha).clamp(0, 1)
            loss, of_w = loss_and_gradient(w[:k], batch)
            rule_of_v.step(alpha[:k] * of_mixture)  # d mixture / d v = alpha
            rule_of_w.step(of_w)
            total[:k] += loss
        kept = Mixture(
            own=Point(w.lerp(v, alpha)), started=w.new_ones(len(w)), v=v, alpha=alpha[:, 0]
        )
        loss = mean_loss(total, steps(self, cohort))
        return local_result(problem, cohort, Point(w), loss, memory=kept)
