"""Group SNIP: neurons are pruned by connection sensitivity before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bfl_baselines.groups import Groups
from bflcore import Point, PointInference, component, option
from bflcore.inference.gradient import Gradient, batches
from bflcore.inference.memory import join_personal, local_result
from bflcore.inference.point import descend, objective
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, Layout, LocalResult, Problem
    from bflcore.inference.gradient import Batch
else:
    torch = lazy("torch")

__all__ = ["GroupSnip"]

SENSITIVITY = "sensitivity"  # key in statistics and in the server's state


@component
class GroupSnip(PointInference):
    """Prune the groups of weights to which the loss is least sensitive, then train.

    Use with ``--hyper accumulate``: in round 1 the clients send their sensitivities and do not
    train; from round 2 on all clients prune by the sum, which is the sensitivity on the pooled
    samples of the clients of round 1. (With another update each client prunes by its own.)
    """

    name = "group-snip"
    reference = "Lee, Ajanthan & Torr 2019 (SNIP), eq. 5, over groups of outgoing weights"

    pruned: float = option(0.5, "fraction of the groups to prune", at_least=0, below=1)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Send the sensitivities in round 1; from round 2 on train what is not pruned."""
        start = join_personal(problem, broadcast.start, cohort).mean
        common = broadcast.hyper.get(SENSITIVITY)
        if cohort.round == 0 or common is None:
            loss, sensitivity = self._sensitivity(problem, cohort, start)
        else:
            sensitivity = common.expand(len(start), -1)
        if cohort.round == 0:
            return local_result(problem, cohort, Point(start), loss, {SENSITIVITY: sensitivity})
        mask = pruning_mask(problem.layout, sensitivity, self.pruned)
        loss_and_gradient = objective(self, problem, cohort, start)

        def masked(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, gradient = loss_and_gradient(w, batch)
            return loss, gradient * mask[: len(w)]

        w, loss = descend(self, problem, cohort, start * mask, masked)
        return local_result(problem, cohort, Point(w), loss)

    def _sensitivity(self, problem: Problem, cohort: Cohort, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss ``[K]`` and n w dL/dw ``[K, P_shared]`` on each client's n samples.

        Both are 0 without samples.
        """
        full = self.replace(local_epochs=1, batch_size=max(1, *cohort.sizes))
        differentiate, loss, gradient = Gradient(problem), w.new_zeros(len(w)), torch.zeros_like(w)
        for batch in batches(full, cohort):  # a single batch, of all clients with samples
            k = len(batch.sizes)
            loss[:k], gradient[:k] = differentiate(w[:k], batch)
        n = w.new_tensor(cohort.sizes)[:, None]
        return loss, problem.layout.split(n * w * gradient)[0]


def pruning_mask(layout: Layout, sensitivity: Tensor, pruned: float) -> Tensor:
    """Return a mask ``[K, P]``: 0 for the fraction `pruned` of the groups with the lowest scores.

    The score of a group is the absolute sum of its `sensitivity` ``[K, P_shared]``; groups of
    personal parameters are kept. Clients whose scores are all zero (without samples) prune nothing.
    """
    groups = Groups(layout, shared_only=True)
    nothing = sensitivity.new_zeros(len(sensitivity), layout.personal_total)
    scores = groups.sums(layout.join(sensitivity, nothing)).abs()
    mask = groups.mask(scores, int(pruned * groups.count))
    return torch.where(scores.sum(1, keepdim=True) > 0, mask, torch.ones_like(mask))
