"""Group-sparse SGD: FedAvg with a group lasso; the smallest neurons are pruned once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bfl_baselines.groups import Groups
from bflcore import Point, PointInference, component, option
from bflcore.inference.memory import join_personal, local_result
from bflcore.inference.point import descend, objective
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem
    from bflcore.inference.gradient import Batch
else:
    torch = lazy("torch")

__all__ = ["GroupSparse"]


@component
class GroupSparse(PointInference):
    """Train with a group lasso on the outgoing weights of each neuron; prune once, then train on.

    After the fraction `prune_after` of the run, all clients set the same groups to zero: those with
    the smallest weights in the server's network. These groups stay zero.
    """

    name = "group-sparse"
    reference = "Scardapane et al. 2017, eq. 6; small groups are removed after training (section 4)"

    group_lasso: float = option(1e-4, "strength of the group lasso penalty (lambda)", at_least=0)
    target: float = option(0.5, "fraction of the groups that pruning keeps", above=0, at_most=1)
    prune_after: float = option(
        0.75, "fraction of the rounds before the groups are pruned", at_least=0, at_most=1
    )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Minimise NLL + lambda sum_g sqrt(|g|) ||w_g|| over the groups that are not pruned."""
        groups = Groups(problem.layout)
        strength = self.group_lasso * groups.sizes[: groups.count].sqrt().to(problem.initial)
        start = join_personal(problem, broadcast.start, cohort).mean
        likelihood = objective(self, problem, cohort, self.centre(problem, broadcast, cohort))
        mask = self._mask(problem, start, cohort.round)

        def penalised(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, gradient = likelihood(w, batch)
            norms = groups.sums(w.square()).sqrt()
            factors = torch.where(norms > 0, strength / norms, 0.0)  # at zero: subgradient 0
            gradient = gradient + groups.spread(factors, 0.0) * w
            return loss, gradient if mask is None else gradient * mask[: len(w)]

        begin = start if mask is None else start * mask
        w, loss = descend(self, problem, cohort, begin, penalised)
        return local_result(problem, cohort, Point(w), loss)

    def _mask(self, problem: Problem, start: Tensor, number: int) -> Tensor | None:
        """Return a mask ``[K, P]``: 0 for the pruned groups of `start` ``[K, P]``; None before.

        Only shared groups are pruned if there are any, so that all clients prune the same ones.
        Later rounds find the same mask again: the groups that are zero are the smallest.
        """
        if number < max(1, math.floor(self.prune_after * problem.rounds + 1e-9)):
            return None
        groups = Groups(problem.layout, shared_only=problem.layout.shared_total > 0)
        mean_square = groups.sums(start.square()) / groups.sizes[: groups.count].to(start)
        return groups.mask(mean_square, round((1 - self.target) * groups.count))
