"""Group-sparse SGD: FedAvg with a group lasso that prunes neurons."""

from __future__ import annotations

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
    """Train with a group lasso on the outgoing weights of each neuron; prune by squared norm."""

    name = "group-sparse"
    reference = "Scardapane et al. 2017, eq. 6"

    group_lasso: float = option(1e-4, "strength of the group lasso penalty (lambda)", at_least=0)
    energy: float = option(
        0.99, "fraction of the squared norm retained after pruning", above=0, at_most=1
    )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Minimise NLL + lambda sum_g sqrt(|g|) ||w_g||, then prune the smallest groups."""
        groups = Groups(problem.layout)
        strength = self.group_lasso * groups.sizes[: groups.count].sqrt().to(problem.initial)
        start = join_personal(problem, broadcast.start, cohort).mean
        likelihood = objective(self, problem, cohort, self.centre(problem, broadcast, cohort))

        def penalised(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, gradient = likelihood(w, batch)
            norms = groups.sums(w.square()).sqrt()
            factors = torch.where(norms > 0, strength / norms, 0.0)  # at zero: subgradient 0
            return loss, gradient + groups.spread(factors, 0.0) * w

        w, loss = descend(self, problem, cohort, start, penalised)
        kept = self._kept(groups, w, cohort)
        return local_result(problem, cohort, Point(w * groups.spread(kept, 1.0)), loss)

    def _kept(self, groups: Groups, w: Tensor, cohort: Cohort) -> Tensor:
        """Return a mask ``[K, count]``: 0 for the groups of `w` ``[K, P]`` with the smallest norms.

        Clients without data have not trained, so they prune nothing.
        """
        energy = groups.sums(w.square())
        ascending, order = energy.sort(dim=1)
        spare = ascending.cumsum(1) <= (1 - self.energy) * energy.sum(1, keepdim=True)
        pruned = torch.zeros_like(spare).scatter_(1, order, spare)
        trained = w.new_tensor(cohort.sizes)[:, None] > 0
        return (~(pruned & trained)).to(w.dtype)
