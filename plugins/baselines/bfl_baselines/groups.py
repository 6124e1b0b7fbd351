"""Sparsity in groups: the outgoing weights of one neuron live or die together.

A group is a column of a weight matrix: what leaves one input of a layer (of a convolution: one
input channel). Biases are in no group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bfl_baselines.slopes import replace
from bflcore.inference.gradient import Gradient, batches
from bflcore.inference.memory import PERSONAL, join_personal, local_result
from bflcore.inference.point import descend, fit_points, objective
from bflcore.posteriors import Point

if TYPE_CHECKING:
    from torch import Tensor

    from bfl_baselines.inferences import GroupSnip, GroupSparse
    from bflcore import Broadcast, Cohort, Layout, LocalResult, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient

SENSITIVITY = "sensitivity"  # its name in statistics and at the server; ``[P_shared]``


class Groups:
    """Which group each coordinate is in; the last, number `count`, is that of the ungrouped."""

    def __init__(self, layout: Layout, shared_only: bool = False) -> None:
        numbers, self.count = [], 0
        for shape, travels in zip(layout.shapes, layout.shared, strict=True):
            if len(shape) < 2 or (shared_only and not travels):
                numbers.append(torch.full(shape, -1).flatten())
                continue
            columns = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
            numbers.append(columns.flatten() + self.count)
            self.count += shape[1]
        index = torch.cat(numbers)
        self.index = torch.where(index < 0, self.count, index)
        self.sizes = torch.bincount(self.index, minlength=self.count + 1)

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` ``[K, P]`` over each group ``[K, count]``."""
        sums = values.new_zeros(len(values), self.count + 1)
        return sums.index_add_(1, self.index.to(values.device), values)[:, : self.count]

    def spread(self, values: Tensor, rest: float) -> Tensor:
        """Give every coordinate its group's value of ``[K, count]``, the ungrouped `rest`."""
        padded = torch.cat([values, values.new_full((len(values), 1), rest)], dim=1)
        return padded[:, self.index.to(values.device)]


def sparse(
    inference: GroupSparse, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Minimise NLL + lambda sum_g sqrt(|g|) ||w_g||; then drop the groups of least energy."""
    groups = Groups(problem.layout)
    scale = inference.group_lasso * groups.sizes[: groups.count].sqrt().to(problem.initial)

    def slope(plain: LossAndGradient, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        nll, gradient = plain(w, batch)
        norms = groups.sums(w.square()).sqrt()
        factors = torch.where(norms > 0, scale / norms, torch.zeros_like(norms))  # subgradient 0
        return nll, gradient + groups.spread(factors, 0.0) * w

    fitted = fit_points(inference, problem, broadcast, cohort, transform=slope)
    w = fitted.posterior.join(Point.unpack(fitted.memory, PERSONAL), problem.layout).mean
    energy = groups.sums(w.square())
    ordered, order = energy.sort(dim=1)
    spare = ordered.cumsum(1) <= (1 - inference.energy) * energy.sum(1, keepdim=True)
    dropped = torch.zeros_like(spare).scatter_(1, order, spare)
    trained = w.new_tensor(cohort.sizes)[:, None] > 0  # without data nothing was learned to drop
    mask = groups.spread((~(dropped & trained)).to(w.dtype), 1.0)
    return local_result(problem, cohort, Point(w * mask), fitted.loss)


def snip(
    inference: GroupSnip, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Mask the groups of least sensitivity |sum_g w dL/dw|, and train the others.

    Round 1 has each client's own sensitivities, and sends them; later ones have everybody's sum,
    which is the sensitivity on the pooled data if clients count equally.
    """
    clients = len(cohort.clients)
    server = join_personal(problem, broadcast.start, cohort.memory, clients).mean
    known, statistics = broadcast.hyper.get(SENSITIVITY), {}
    if known is None:
        everything = replace(inference, local_epochs=1, batch_size=max(1, *cohort.sizes))
        slopes = torch.zeros_like(server)
        for batch in batches(everything, cohort):
            k = len(batch.sizes)
            slopes[:k] = Gradient(problem)(server[:k], batch)[1]
        known = problem.layout.split(server * slopes)[0].clone()
        statistics = {SENSITIVITY: known}
    mask = _mask(problem, known.expand(clients, -1), inference.pruned)

    def slope(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        nll, gradient = plain(w, batch)
        return nll, gradient * mask[: len(w)]

    plain = objective(inference, problem, cohort, server)
    w = server * mask
    w, loss = descend(inference, problem, cohort, w, broadcast.round, slope)
    return local_result(problem, cohort, Point(w), loss, statistics)


def _mask(problem: Problem, sensitivity: Tensor, pruned: float) -> Tensor:
    """Return 0 on the share `pruned` of the groups that matters least, else 1 ``[K, P]``."""
    layout = problem.layout
    groups = Groups(layout, shared_only=True)
    nothing = sensitivity.new_zeros(len(sensitivity), layout.personal_total)
    scores = groups.sums(layout.join(sensitivity, nothing)).abs()
    least = scores.argsort(dim=1, stable=True)[:, : int(pruned * groups.count)]
    kept = torch.ones_like(scores).scatter_(1, least, 0.0)
    kept = torch.where(scores.sum(1, keepdim=True) > 0, kept, torch.ones_like(kept))
    return groups.spread(kept, 1.0)
