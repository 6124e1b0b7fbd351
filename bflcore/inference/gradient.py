"""Inference by minibatch gradients: its options, the minibatches of a cohort, the optimiser."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol

import attrs

from bflcore.inference.base import LocalInference
from bflcore.lazy import lazy
from bflcore.options import component, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Cohort
    from bflcore.problem import Problem
else:
    torch = lazy("torch")

__all__ = [
    "Batch",
    "Gradient",
    "GradientInference",
    "Optimiser",
    "Trainable",
    "batches",
    "loss_per_client",
    "mean_loss",
    "steps",
    "trainable_mask",
]

Trainable = Literal["all", "personal", "shared"]  # which parameters training may change


@component
class GradientInference(LocalInference):
    """Base of inferences that minimise an objective by minibatch gradients."""

    lr: float = option(1e-3, "learning rate", above=0)
    local_epochs: int = option(10, "passes over a client's data per round", at_least=1)
    batch_size: int = option(50, "samples per minibatch; the last batch may be smaller", at_least=1)
    optimiser: str = option("adam", "update rule", choices=("adam", "sgd"), aliases=("optimizer",))
    momentum: float = option(0.0, "momentum of sgd", at_least=0, below=1)
    lr_decay: float = option(0.0, "fraction by which lr falls each round", at_least=0, below=1)
    lr_decay_after: int = option(0, "round after which lr begins to fall", at_least=0)

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round (counted from 0)."""
        return self.lr * (1 - self.lr_decay) ** max(0, round - self.lr_decay_after)

    def update_rule(self, parameters: Tensor, cohort: Cohort) -> Optimiser:
        """Return the optimiser of `parameters` ``[K, ...]`` for the cohort's round."""
        taken, lr = steps(self, cohort), self.lr_at(cohort.round)
        return Optimiser(parameters, taken, self.optimiser, lr, self.momentum)


@attrs.frozen(eq=False)
class Batch:
    """One minibatch of every client that still has a step to take: the first rows of the cohort.

    `x` ``[k, B, ...]``, `y` ``[k, B]`` or ``[k, B, T]``, `sizes` the true batch sizes. `weight`
    ``[k, B]`` is 1/size on samples and 0 on padding; None where nothing is padded.
    """

    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]
    weight: Tensor | None = None


class Sweeps(Protocol):
    """What passes over data need to know of an inference."""

    @property
    def local_epochs(self) -> int:
        """Passes over a client's data per round."""

    @property
    def batch_size(self) -> int:
        """Samples per minibatch."""


def steps(inference: Sweeps, cohort: Cohort) -> tuple[int, ...]:
    """Return the number of optimiser steps of each client in a round."""
    return tuple(inference.local_epochs * -(-size // inference.batch_size) for size in cohort.sizes)


def batches(inference: Sweeps, cohort: Cohort) -> Iterator[Batch]:
    """Yield every minibatch of a round: each epoch a fresh permutation of each client's samples."""
    plans = [
        _plan(size, inference, generator)
        for size, generator in zip(cohort.sizes, cohort.streams("batches"), strict=True)
    ]
    for step in range(max(map(len, plans))):
        chosen = [plan[step] for plan in plans if step < len(plan)]
        if len(chosen) == 1:
            index = chosen[0]
            yield Batch(
                cohort.x[0].index_select(0, index)[None],
                cohort.y[0].index_select(0, index)[None],
                (len(index),),
            )
        else:
            yield _padded(cohort, chosen)


def _plan(size: int, inference: Sweeps, generator: torch.Generator) -> list[Tensor]:
    device = generator.device
    if not size:
        return []
    return [
        index
        for _ in range(inference.local_epochs)
        for index in torch.randperm(size, generator=generator, device=device).split(
            inference.batch_size
        )
    ]


def _padded(cohort: Cohort, chosen: list[Tensor]) -> Batch:
    sizes = tuple(map(len, chosen))
    index = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    rows = torch.arange(len(chosen), device=index.device)[:, None]
    weight = None
    if min(sizes) < max(sizes):
        size = torch.tensor(sizes, device=index.device)[:, None]
        real = torch.arange(index.shape[1], device=index.device) < size
        weight = real.to(cohort.x.dtype) / size
    return Batch(cohort.x[rows, index], cohort.y[rows, index], sizes, weight)


def loss_per_client(problem: Problem, outputs: Tensor, batch: Batch) -> Tensor:
    """Return each client's mean negative log likelihood over its batch ``[k]``."""
    nll = problem.likelihood.nll(outputs.flatten(0, 1), batch.y.flatten(0, 1))
    nll = nll.view(outputs.shape[:2])
    return nll.mean(1) if batch.weight is None else (nll * batch.weight).sum(1)


class Gradient:
    """The loss of K networks and its gradient in their parameters.

    One client differentiates through a copy of the network whose parameters are views of its
    vector: nothing is swapped, split or joined on the way. More go through `Problem.forward`.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._network = copy.deepcopy(problem.network).requires_grad_(True)
        self._parameters = list(self._network.parameters())

    def __call__(
        self,
        weights: Tensor,
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the losses ``[k]`` and the gradient ``[k, P]`` at `weights` ``[k, P]``.

        `buffers` ``[k, ...]`` replace the network's buffers by name (see `Problem.forward`). The
        gradient is written to `out` if given, else to a new tensor.
        """
        if len(weights) > 1:
            leaf = weights.detach().requires_grad_()
            outputs = self._problem.forward(leaf, batch.x, buffers)
            nll = loss_per_client(self._problem, outputs, batch)
            (gradient,) = torch.autograd.grad(nll.sum(), leaf)
            return nll.detach(), gradient if out is None else out.copy_(gradient)
        views = self._problem.layout.unflatten(weights.detach()[0]).values()
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view
        alone = {name: tensor.squeeze(0) for name, tensor in (buffers or {}).items()}
        outputs = self._call(batch.x.squeeze(0), alone).unsqueeze(0)
        nll = loss_per_client(self._problem, outputs, batch)
        pieces = torch.autograd.grad(nll, self._parameters, materialize_grads=True)
        rows = [piece.reshape(1, -1) for piece in pieces]
        return nll.detach(), torch.cat(rows, dim=1, out=out)

    def _call(self, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        if not buffers:  # functional_call has its price, too
            outputs: Tensor = self._network(x)
        else:
            outputs = torch.func.functional_call(self._network, buffers, (x,))
        return outputs


class Optimiser:
    """One elementwise update rule over a cohort's parameters ``[K, ...]``, changed in place.

    `steps` says how many steps each client takes; `rule` is ``adam`` or ``sgd``, `momentum` that
    of SGD. Clients with equally many steps are updated as one tensor; one that has taken all its
    steps is left out, so that further steps do not change it.
    """

    def __init__(
        self,
        parameters: Tensor,
        steps: tuple[int, ...],
        rule: str,
        lr: float,
        momentum: float = 0.0,
    ) -> None:
        self._ends = _group_ends(steps)
        starts = [0, *self._ends[:-1]]
        self._groups = [
            parameters[start:end].detach() for start, end in zip(starts, self._ends, strict=True)
        ]
        self._rule: torch.optim.Optimizer
        if rule == "adam":
            self._rule = torch.optim.Adam(self._groups, lr=lr, fused=True)
        else:
            self._rule = torch.optim.SGD(self._groups, lr=lr, momentum=momentum, fused=True)

    def step(self, gradient: Tensor) -> None:
        """Take one step for the first k clients, from their gradient ``[k, ...]``."""
        start = 0
        for group, end in zip(self._groups, self._ends, strict=True):
            group.grad = gradient[start:end] if end <= len(gradient) else None
            start = end
        self._rule.step()


def _group_ends(steps: tuple[int, ...]) -> list[int]:
    ends: list[int] = []
    for _, rows in groupby(steps):
        ends.append((ends[-1] if ends else 0) + len(list(rows)))
    return ends


def mean_loss(total: Tensor, taken: tuple[int, ...]) -> Tensor:
    """Divide each client's sum of losses ``[K]`` by its steps; without any its loss is zero."""
    return total / torch.tensor(taken, device=total.device).clamp_min(1)


def trainable_mask(problem: Problem, trainable: Trainable) -> Tensor | None:
    """Return 1 for parameters ``[P]`` that may change and 0 for the others; None for all."""
    if trainable == "all":
        return None
    layout = problem.layout
    personal = float(trainable == "personal")
    shared = problem.initial.new_full((layout.shared_total,), 1 - personal)
    return layout.join(shared, problem.initial.new_full((layout.personal_total,), personal))
