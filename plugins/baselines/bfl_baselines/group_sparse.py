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

MOMENTS = "input_moments"  # key in statistics and in the server's state


@component
class GroupSparse(PointInference):
    """Train with a group lasso on the outgoing weights of each neuron; prune once, then train on.

    After the fraction `prune_after` of the run, all clients set the same groups to zero: those with
    the smallest weights in the server's network. These groups stay zero.

    The norm is a weak score of inputs that hardly vary: their weights keep their initial size. The
    `effect` of a group is the variance of what it adds to the next layer. It needs ``--hyper
    accumulate``: in the round before, clients send sums over their samples, which give the variance
    of each input on the pooled samples. (With another update each client prunes by its own.)
    """

    name = "group-sparse"
    reference = "Scardapane et al. 2017, eq. 6; small groups are removed after training (section 4)"

    group_lasso: float = option(1e-4, "strength of the group lasso penalty (lambda)", at_least=0)
    target: float = option(0.5, "fraction of the groups that pruning keeps", above=0, at_most=1)
    prune_after: float = option(
        0.75, "fraction of the rounds before the groups are pruned", at_least=0, at_most=1
    )
    score: str = option(
        "norm",
        "what ranks the groups: mean square weight (norm), or squared norm times the variance of "
        "the group's input (effect)",
        choices=("norm", "effect"),
    )
    by_layer: bool = option(False, "prune the same fraction of each layer's groups")

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Minimise NLL + lambda sum_g sqrt(|g|) ||w_g|| over the groups that are not pruned."""
        groups = Groups(problem.layout)
        strength = self.group_lasso * groups.sizes[: groups.count].sqrt().to(problem.initial)
        start = join_personal(problem, broadcast.start, cohort).mean
        likelihood = objective(self, problem, cohort, self.centre(problem, broadcast, cohort))
        common = broadcast.hyper.get(MOMENTS)
        mask, statistics = None, {}
        if cohort.round >= self._cut(problem):
            mask = self._mask(problem, cohort, start, common)
        elif self.score == "effect" and cohort.round == self._cut(problem) - 1:
            statistics = {MOMENTS: self._moments(problem, cohort, start)}

        def penalised(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, gradient = likelihood(w, batch)
            norms = groups.sums(w.square()).sqrt()
            factors = torch.where(norms > 0, strength / norms, 0.0)  # at zero: subgradient 0
            gradient = gradient + groups.spread(factors, 0.0) * w
            return loss, gradient if mask is None else gradient * mask[: len(w)]

        begin = start if mask is None else start * mask
        w, loss = descend(self, problem, cohort, begin, penalised)
        return local_result(problem, cohort, Point(w), loss, statistics)

    def _cut(self, problem: Problem) -> int:
        """Return the round, counted from 0, from which on groups are pruned."""
        return max(1, math.floor(self.prune_after * problem.rounds + 1e-9))

    def _mask(
        self, problem: Problem, cohort: Cohort, start: Tensor, moments: Tensor | None
    ) -> Tensor:
        """Return a mask ``[K, P]``: 0 for the pruned groups of `start` ``[K, P]``.

        `moments` ``[3, groups]`` are those of the groups' inputs. Only shared groups are pruned if
        there are any, so that all clients prune the same ones. Later rounds find the same mask
        again: the groups that are zero have the lowest scores.
        """
        groups = _prunable(problem)
        squares = groups.sums(start.square())
        if self.score == "norm":
            scores = squares / groups.sizes[: groups.count].to(start)
        else:
            own = self._moments(problem, cohort, start) if moments is None else moments[None]
            count, total, square = own.to(start).unbind(1)
            count = count.clamp(min=1)
            scores = squares * (square / count - (total / count).square()).clamp(min=0)
        if self.by_layer:
            scores = groups.ranks(scores)
        return groups.mask(scores, round((1 - self.target) * groups.count))

    @staticmethod
    def _moments(problem: Problem, cohort: Cohort, w: Tensor) -> Tensor:
        """Return the moments of each group's inputs ``[K, 3, groups]`` on each client's samples."""
        groups = _prunable(problem)
        with torch.no_grad():
            return torch.stack(
                [
                    groups.moments(problem.network, problem.layout.unflatten(one), x[:size])
                    for one, x, size in zip(w, cohort.x, cohort.sizes, strict=True)
                ]
            )


def _prunable(problem: Problem) -> Groups:
    """Return the shared groups, or all of them if none is shared."""
    return Groups(problem.layout, shared_only=problem.layout.shared_total > 0)
