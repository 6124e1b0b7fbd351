"""Per-FedAvg: meta-learning of a network that adapts to a client in one gradient step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bfl_baselines.staged import fine_tune
from bflcore import PointInference, component, option
from bflcore.inference.point import fit_points
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient
else:
    torch = lazy("torch")

__all__ = ["MetaLearning"]


@component
class MetaLearning(PointInference):
    """Train a network to perform well after one adaptation step (first-order MAML)."""

    name = "per-fedavg"
    reference = "Fallah, Mokhtari & Ozdaglar 2020 (Per-FedAvg), Algorithm 1, Hessian dropped"

    inner_lr: float = option(0.01, "learning rate of the adaptation step (alpha)", above=0)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client with the meta-gradient."""
        return fit_points(self, problem, broadcast, cohort, transform=self._meta_gradient)

    def _meta_gradient(
        self, loss_and_gradient: LossAndGradient, w: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return g(w - alpha g(w; B1); B2), where B1 and B2 are the halves of the minibatch."""
        first, second = halves(batch)
        _, gradient = loss_and_gradient(w, first)
        return loss_and_gradient(w.sub(gradient, alpha=self.inner_lr), second)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Adapt by one gradient step on all of a client's samples."""
        one_step = self.replace(
            optimiser="sgd", momentum=0.0, lr=self.inner_lr, lr_decay=0.0, local_epochs=1,
            batch_size=max(1, *cohort.sizes),
        )  # fmt: skip
        return fine_tune(one_step, problem, broadcast, cohort)


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Halve each client's samples through the weights; both halves share an odd middle sample."""
    sizes = torch.tensor(batch.sizes, device=batch.x.device)[:, None]
    row = torch.arange(batch.y.shape[1], device=batch.x.device)
    first, second = row < (sizes + 1) // 2, (row >= sizes // 2) & (row < sizes)
    one, two = (half.to(batch.x.dtype) / half.sum(1, keepdim=True) for half in (first, second))
    return attrs.evolve(batch, weight=one), attrs.evolve(batch, weight=two)
