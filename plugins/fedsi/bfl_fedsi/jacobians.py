"""Jacobians of a network's outputs in its shared parameters, sample by sample.

R counts the shared parameters, in the order of `Layout.split`. A network whose shared
parameters all belong to linear layers never has its Jacobian ``[B, O, R]`` formed: a row is the
outer product of the signal that comes back to a layer and of what went into it.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Problem
else:
    torch = lazy("torch")

__all__ = ["Jacobian", "blocks"]

ELEMENTS = 2**22  # numbers held for a block of samples: 16 MB in float32


class Jacobian(abc.ABC):
    """The rows d f_o / d theta of a block of samples, and the outputs f ``[B, O]``."""

    outputs: Tensor

    @abc.abstractmethod
    def times(self, factor: Tensor) -> Jacobian:
        """Return L^T J for factors L ``[B, O, O]``."""

    @abc.abstractmethod
    def columns(self, index: Tensor) -> Tensor:
        """Return the columns of the parameters `index` ``[S]``, in rising order: ``[B, O, S]``."""

    def dot(self, index: Tensor, vectors: Tensor) -> Tensor:
        """Return ``columns(index) @ vectors.T`` ``[B, O, M]`` for `vectors` ``[M, S]``."""
        return self.columns(index) @ vectors.T

    @abc.abstractmethod
    def squares(self) -> Tensor:
        """Return the sum over samples and outputs of J^2 ``[R]``."""

    @abc.abstractmethod
    def quadratic(self, variance: Tensor) -> Tensor:
        """Return J diag(variance) J^T ``[B, O, O]`` for `variance` ``[R]``."""


@attrs.frozen(eq=False)
class Dense(Jacobian):
    """A Jacobian as it is, ``[B, O, R]``."""

    outputs: Tensor
    rows: Tensor

    def times(self, factor: Tensor) -> Dense:
        """Multiply; see `Jacobian.times`."""
        return Dense(self.outputs, factor.mT @ self.rows)

    def columns(self, index: Tensor) -> Tensor:
        """Gather; see `Jacobian.columns`."""
        return self.rows.index_select(2, index)

    def squares(self) -> Tensor:
        """Sum; see `Jacobian.squares`."""
        return self.rows.square().sum((0, 1))

    def quadratic(self, variance: Tensor) -> Tensor:
        """Multiply; see `Jacobian.quadratic`."""
        return (self.rows * variance) @ self.rows.mT


@attrs.frozen(eq=False)
class Piece:
    """A parameter of a linear layer: its place in R, the layer's input and the back-signal.

    d f_o / d W_ab = signal_oa input_b for a weight; a bias has the input 1 ``[B, 1]``.
    """

    first: int
    last: int
    inputs: Tensor  # [B, in]
    signal: Tensor  # [B, O, out]

    def columns(self, index: Tensor) -> Tensor:
        local = index - self.first
        width = self.inputs.shape[1]
        signal = self.signal.index_select(2, local // width)
        return signal.mul_(self.inputs.index_select(1, local % width)[:, None])

    def dot(self, index: Tensor, vectors: Tensor) -> Tensor:
        """Sum over the inputs of each unit first: the outputs share them."""
        width = self.inputs.shape[1]
        units, counts = ((index - self.first) // width).unique_consecutive(return_counts=True)
        inputs = self.inputs.index_select(1, (index - self.first) % width).split(counts.tolist(), 1)
        each = list(zip(inputs, vectors.split(counts.tolist(), 1), strict=True))
        signal = self.signal.index_select(2, units)
        total = signal.new_zeros(*signal.shape[:2], len(vectors))
        step = max(1, ELEMENTS // (len(signal) * max(1, len(vectors))))  # units at a time
        for first in range(0, len(each), step):
            part = slice(first, first + step)
            summed = torch.stack([given @ v.T for given, v in each[part]], dim=1)  # [B, units, M]
            total.baddbmm_(signal[:, :, part], summed)
        return total

    def squares(self) -> Tensor:
        return (self.signal.square().sum(1).T @ self.inputs.square()).reshape(-1)

    def quadratic(self, variance: Tensor) -> Tensor:
        spread = (
            self.inputs.square() @ variance[self.first : self.last].view(self.signal.shape[2], -1).T
        )
        return (self.signal * spread[:, None]) @ self.signal.mT


@attrs.frozen(eq=False)
class Linear(Jacobian):
    """The Jacobian of linear layers, as inputs and back-signals."""

    outputs: Tensor
    pieces: tuple[Piece, ...]

    def times(self, factor: Tensor) -> Linear:
        """Multiply the back-signals; see `Jacobian.times`."""
        moved = (attrs.evolve(p, signal=factor.mT @ p.signal) for p in self.pieces)
        return Linear(self.outputs, tuple(moved))

    def columns(self, index: Tensor) -> Tensor:
        """Gather outer products; see `Jacobian.columns`."""
        parts = zip(self.pieces, index.split(self._counts(index)), strict=True)
        return torch.cat([piece.columns(part) for piece, part in parts], dim=2)

    def dot(self, index: Tensor, vectors: Tensor) -> Tensor:
        """Sum over the layers; see `Jacobian.dot`."""
        counts = self._counts(index)
        parts = zip(self.pieces, index.split(counts), vectors.split(counts, 1), strict=True)
        found = [piece.dot(*part) for piece, *part in parts if len(part[0])]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]

    def _counts(self, index: Tensor) -> list[int]:
        """Return how many of `index`, in rising order, each piece has."""
        borders = torch.tensor([piece.last for piece in self.pieces], device=index.device)
        return torch.searchsorted(index, borders).diff(prepend=borders.new_zeros(1)).tolist()

    def squares(self) -> Tensor:
        """Multiply squares; see `Jacobian.squares`."""
        return torch.cat([piece.squares() for piece in self.pieces])

    def quadratic(self, variance: Tensor) -> Tensor:
        """Sum over the layers; see `Jacobian.quadratic`."""
        return torch.stack([piece.quadratic(variance) for piece in self.pieces]).sum(0)


def blocks(problem: Problem, weights: Tensor, x: Tensor, width: int) -> Iterator[Jacobian]:
    """Yield the Jacobian at `weights` ``[P]`` for samples `x` ``[N, ...]``, block by block.

    `width` is the number of columns that will be asked of a block: it sets the block's size.
    """
    linear = _linear_jacobian(problem, weights, x[:1])
    make = linear or _dense_jacobian(problem, weights)
    widest = max(max(shape, default=1) for shape in problem.layout.shapes)
    width = max(width, widest) if linear else problem.layout.shared_total
    with torch.no_grad():
        outputs = problem.forward(weights[None], x[None, :1]).shape[-1]
    for samples in x.split(max(1, ELEMENTS // (width * outputs))):
        yield make(samples)


def _dense_jacobian(problem: Problem, weights: Tensor) -> Callable[[Tensor], Dense]:
    shared, personal = problem.layout.split(weights)

    def output(theta: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        whole = problem.layout.join(theta, personal)
        outputs = problem.forward(whole[None], sample[None, None])[0, 0]
        return outputs, outputs

    differentiate = torch.func.vmap(torch.func.jacrev(output, has_aux=True), in_dims=(None, 0))

    def make(samples: Tensor) -> Dense:
        with torch.no_grad():
            rows, outputs = differentiate(shared, samples)
        return Dense(outputs, rows)

    return make


def _linear_jacobian(
    problem: Problem, weights: Tensor, sample: Tensor
) -> Callable[[Tensor], Linear] | None:
    """Return what makes `Linear` Jacobians, or None where some parameter needs the dense one."""
    network = copy.deepcopy(problem.network).requires_grad_(True)
    for name, value in problem.layout.unflatten(weights.detach()).items():
        network.get_parameter(name).data = value
    shared = [
        name
        for name, is_shared in zip(problem.layout.names, problem.layout.shared, strict=True)
        if is_shared
    ]
    layers = {name.rpartition(".")[0] for name in shared}
    tied = len(list(network.named_parameters(remove_duplicate=False))) > len(problem.layout.names)
    if tied or any(type(network.get_submodule(path)) is not torch.nn.Linear for path in layers):
        return None
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in layers}
    for path in layers:
        network.get_submodule(path).register_forward_hook(
            lambda _module, given, result, at=path: seen[at].append((given[0], result))
        )

    def run(samples: Tensor) -> Tensor:
        for calls in seen.values():
            calls.clear()
        outputs: Tensor = network(samples)
        return outputs

    with torch.no_grad():
        run(sample)
    if any(len(calls) != 1 or calls[0][0].ndim != 2 for calls in seen.values()):
        return None  # a layer that is used twice, or at many places of a sample

    @torch.enable_grad()
    def make(samples: Tensor) -> Linear:
        outputs = run(samples)
        results = [calls[0][1] for calls in seen.values()]
        back = [
            torch.autograd.grad(outputs[:, o].sum(), results, retain_graph=True)
            for o in range(outputs.shape[1])
        ]
        signals = {
            path: torch.stack(of, dim=1)
            for path, of in zip(seen, zip(*back, strict=True), strict=True)
        }
        pieces, first = [], 0
        for name in shared:
            path, _, kind = name.rpartition(".")
            given = seen[path][0][0].detach()
            inputs = given if kind == "weight" else given.new_ones(len(given), 1)
            last = first + network.get_parameter(name).numel()
            pieces.append(Piece(first, last, inputs, signals[path]))
            first = last
        return Linear(outputs.detach(), tuple(pieces))

    return make
