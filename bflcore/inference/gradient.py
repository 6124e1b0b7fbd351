"""Inference by minibatch gradients: its options, the minibatches of a cohort, the optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    momentum: float = option(0.0, "momentum (sgd only)", at_least=0, below=1)
    lr_decay: float = option(0.0, "fraction by which lr falls per round", at_least=0, below=1)
    lr_decay_after: int = option(0, "number of rounds before lr falls", at_least=0)

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round (rounds count from 0)."""
        return self.lr * (1 - self.lr_decay) ** max(0, round - self.lr_decay_after)

    def update_rule(self, parameters: Tensor, cohort: Cohort) -> Optimiser:
        """Return an optimiser for `parameters` ``[K, ...]`` in the cohort's round."""
        taken, lr = steps(self, cohort), self.lr_at(cohort.round)
        return Optimiser(parameters, taken, self.optimiser, lr, self.momentum)


@attrs.frozen(eq=False)
class Batch:
    """One minibatch of each client that still has steps left: the first k of the cohort.

    `x` ``[k, B, ...]``, `y` ``[k, B]`` or ``[k, B, T]``; `sizes` are the true batch sizes. `weight`
    ``[k, B]`` is 1/size for samples and 0 for padding; None without padding.
    """

    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]
    weight: Tensor | None = None


class Sweeps(Protocol):
    """The options that determine how often, and in what batches, an inference sees the data."""

    @property
    def local_epochs(self) -> int:
        """Passes over a client's data per round."""

    @property
    def batch_size(self) -> int:
        """Samples per minibatch."""


def steps(inference: Sweeps, cohort: Cohort) -> tuple[int, ...]:
    """Return how many optimiser steps each client takes per round."""
    return tuple(inference.local_epochs * -(-size // inference.batch_size) for size in cohort.sizes)


def batches(inference: Sweeps, cohort: Cohort) -> Iterator[Batch]:
    """Yield the minibatches of a round; each epoch shuffles each client's samples anew."""
    plans = []
    for size, generator in zip(cohort.sizes, cohort.streams("batches"), strict=True):
        orders = [
            torch.randperm(size, generator=generator, device=generator.device)
            for _ in range(inference.local_epochs if size else 0)
        ]
        plans.append([rows for order in orders for rows in order.split(inference.batch_size)])
    for step in range(max(map(len, plans))):
        yield _batch(cohort, [plan[step] for plan in plans if step < len(plan)])


def _batch(cohort: Cohort, chosen: list[Tensor]) -> Batch:
    sizes = tuple(map(len, chosen))
    if len(chosen) == 1:
        x, y = (values[0].index_select(0, chosen[0])[None] for values in (cohort.x, cohort.y))
        return Batch(x, y, sizes)
    index = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    rows = torch.arange(len(chosen), device=index.device)[:, None]
    weight = None
    if min(sizes) < max(sizes):
        size = torch.tensor(sizes, device=index.device)[:, None]
        real = torch.arange(index.shape[1], device=index.device) < size
        weight = real.to(cohort.x.dtype) / size
    return Batch(cohort.x[rows, index], cohort.y[rows, index], sizes, weight)


def loss_per_client(problem: Problem, outputs: Tensor, batch: Batch) -> Tensor:
    """Return each client's mean NLL ``[k]`` over its batch, from outputs ``[k, B, C]``."""
    nll = problem.likelihood.nll(outputs.flatten(0, 1), batch.y.flatten(0, 1))
    nll = nll.view(outputs.shape[:2])
    return nll.mean(1) if batch.weight is None else (nll * batch.weight).sum(1)


class Gradient:
    """The losses of K networks and the gradients with respect to their parameters.

    For one client it differentiates a copy of the network whose parameters are views of the weight
    vector, which avoids the cost of `Problem.forward`.
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
        """Return the losses ``[k]`` and the gradients ``[k, P]`` at `weights` ``[k, P]``.

        `buffers` ``[k, ...]`` replace the network's buffers by name (see `Problem.forward`). The
        gradients are written to `out` ``[k, P]`` if given, else to a new tensor.
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
        if buffers:
            alone = {name: tensor.squeeze(0) for name, tensor in buffers.items()}
            outputs = torch.func.functional_call(self._network, alone, (batch.x.squeeze(0),))
        else:  # functional_call costs time, too
            outputs = self._network(batch.x.squeeze(0))
        outputs = self._problem.shifted(outputs.unsqueeze(0))
        nll = loss_per_client(self._problem, outputs, batch)
        pieces = torch.autograd.grad(nll, self._parameters, materialize_grads=True)
        rows = [piece.reshape(1, -1) for piece in pieces]
        return nll.detach(), torch.cat(rows, dim=1, out=out)


class Optimiser:
    """Adam or SGD on a cohort's parameters ``[K, ...]``, which it changes in place.

    Client k takes ``steps[k]`` steps; after them its parameters stay as they are. Neighbouring
    clients with equally many steps are updated as one tensor.
    """

    def __init__(
        self,
        parameters: Tensor,
        steps: tuple[int, ...],
        rule: str,
        lr: float,
        momentum: float = 0.0,
    ) -> None:
        ends = accumulate(len(list(clients)) for _, clients in groupby(steps))
        self._groups = [
            (parameters[start:end].detach(), start, end) for start, end in pairwise([0, *ends])
        ]
        tensors = [group for group, _, _ in self._groups]
        # What torch's optimiser classes call; merely making one imports torch._dynamo (1.5 s).
        from torch.optim.adam import adam
        from torch.optim.sgd import sgd

        settings: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "maximize": False, "fused": True}
        moments = [torch.zeros_like(group) for group in tensors]
        self._state: tuple[list[Tensor], ...] = (moments,)
        self._update: Callable[..., None] = partial(
            sgd, momentum=momentum, dampening=0.0, nesterov=False, **settings
        )
        if rule == "adam":
            squares = [torch.zeros_like(group) for group in tensors]
            counts = [torch.zeros((), dtype=torch.float32, device=t.device) for t in tensors]
            self._state = (moments, squares, [], counts)
            self._update = partial(
                adam, beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=False, **settings
            )

    def step(self, gradient: Tensor) -> None:
        """Take one step for the first k clients, given their gradients ``[k, ...]``."""
        # Groups are ordered by falling numbers of steps.
        active = [group for group in self._groups if group[2] <= len(gradient)]
        if active:
            # Fused rules need contiguous memory.
            rows = [gradient[start:end].contiguous() for _, start, end in active]
            state = [each[: len(active)] for each in self._state]
            self._update([group for group, _, _ in active], rows, *state)


def mean_loss(total: Tensor, taken: tuple[int, ...]) -> Tensor:
    """Divide each client's sum of losses ``[K]`` by its number of steps (0 without steps)."""
    return total / torch.tensor(taken, device=total.device).clamp_min(1)


def trainable_mask(problem: Problem, trainable: Trainable) -> Tensor | None:
    """Return a mask ``[P]``: 1 for trainable parameters, 0 for fixed ones; None if all train."""
    if trainable == "all":
        return None
    layout, ones = problem.layout, torch.ones_like(problem.initial)
    shared, personal = layout.split(ones)
    if trainable == "personal":
        return layout.join(torch.zeros_like(shared), personal)
    return layout.join(shared, torch.zeros_like(personal))
