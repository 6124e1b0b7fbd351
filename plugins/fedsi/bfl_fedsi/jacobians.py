"""Per-sample Jacobians of a network's outputs with respect to its shared parameters.

R is the number of shared parameters, in the order of `Layout.split`. If all of them belong to
linear layers, the Jacobian ``[B, O, R]`` is never formed: a row is the outer product of the
backpropagated signal of a layer and of its input.
"""

from __future__ import annotations

import abc
import copy
import warnings
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

ELEMENTS = 2**22  # numbers in memory per block of samples: 16 MB in float32


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
    """A Jacobian stored as a tensor ``[B, O, R]``."""

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
    """One tensor of a linear layer: its range in R, the layer's input, the backpropagated signal.

    d f_o / d W_ab = signal_oa input_b for a weight; the input of a bias is 1 ``[B, 1]``.
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
        """Sum over the inputs of each unit first, since all outputs share them."""
        width = self.inputs.shape[1]
        units, counts = ((index - self.first) // width).unique_consecutive(return_counts=True)
        inputs = self.inputs.index_select(1, (index - self.first) % width).split(counts.tolist(), 1)
        each = list(zip(inputs, vectors.split(counts.tolist(), 1), strict=True))
        signal = self.signal.index_select(2, units)
        total = signal.new_zeros(*signal.shape[:2], len(vectors))
        step = max(1, ELEMENTS // (len(signal) * max(1, len(vectors))))  # units at a time
        for first in range(0, len(each), step):
            chunk = slice(first, first + step)
            summed = torch.stack([given @ v.T for given, v in each[chunk]], dim=1)  # [B, units, M]
            total.baddbmm_(signal[:, :, chunk], summed)
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
    """The Jacobian of linear layers, stored as inputs and backpropagated signals."""

    outputs: Tensor
    pieces: tuple[Piece, ...]

    def times(self, factor: Tensor) -> Linear:
        """Multiply the signals; see `Jacobian.times`."""
        moved = (attrs.evolve(p, signal=factor.mT @ p.signal) for p in self.pieces)
        return Linear(self.outputs, tuple(moved))

    def columns(self, index: Tensor) -> Tensor:
        """Gather outer products; see `Jacobian.columns`."""
        chunks = index.split(self._counts(index))
        pairs = zip(self.pieces, chunks, strict=True)
        return torch.cat([piece.columns(chunk) for piece, chunk in pairs], dim=2)

    def dot(self, index: Tensor, vectors: Tensor) -> Tensor:
        """Sum over the layers; see `Jacobian.dot`."""
        counts = self._counts(index)
        chunks = zip(self.pieces, index.split(counts), vectors.split(counts, 1), strict=True)
        found = [piece.dot(at, rows) for piece, at, rows in chunks if len(at)]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]

    def _counts(self, index: Tensor) -> list[int]:
        """Return how many entries of `index`, in rising order, belong to each piece."""
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

    `width` is the number of columns that the caller will request, which limits the block size.
    """
    linear = _linear_jacobian(problem, weights, x[:1])
    make = linear or _dense_jacobian(problem, weights, x[:1])
    widest = max(max(shape, default=1) for shape in problem.layout.shapes)
    width = max(width, widest) if linear else problem.layout.shared_total
    with torch.no_grad():
        outputs = problem.forward(weights[None], x[None, :1]).shape[-1]
    for samples in x.split(max(1, ELEMENTS // (width * outputs))):
        yield make(samples)


def _dense_jacobian(problem: Problem, weights: Tensor, sample: Tensor) -> Callable[[Tensor], Dense]:
    """Return a function that builds `Dense` Jacobians, tried on `sample` ``[1, ...]``."""
    shared, personal = problem.layout.split(weights)

    def output(theta: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        whole = problem.layout.join(theta, personal)
        outputs = problem.forward(whole[None], sample[None, None])[0, 0]
        return outputs, outputs

    differentiate = torch.func.vmap(torch.func.jacrev(output, has_aux=True), in_dims=(None, 0))

    def make(samples: Tensor) -> Dense:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            rows, outputs = differentiate(shared, samples)
        return Dense(outputs, rows)

    try:
        make(sample)
    except (RuntimeError, TypeError):  # `torch.func` has no rule for a layer (torch.nn.LSTM)
        return _repeated_jacobian(problem, shared, personal)
    return make


def _repeated_jacobian(
    problem: Problem, shared: Tensor, personal: Tensor
) -> Callable[[Tensor], Dense]:
    """Return a function that differentiates every output of every sample by itself."""

    @torch.enable_grad()
    def make(samples: Tensor) -> Dense:
        theta = shared.detach().requires_grad_()
        whole = problem.layout.join(theta, personal)
        outputs = problem.forward(whole[None], samples[None])[0]
        rows = [torch.autograd.grad(one, theta, retain_graph=True)[0] for one in outputs.flatten()]
        return Dense(outputs.detach(), torch.stack(rows).view(*outputs.shape, -1))

    return make


def _linear_jacobian(
    problem: Problem, weights: Tensor, sample: Tensor
) -> Callable[[Tensor], Linear] | None:
    """Return a function that builds `Linear` Jacobians; None if a parameter needs a dense one."""
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
        return problem.shifted(network(samples))

    with torch.no_grad():
        run(sample)
    if any(len(calls) != 1 or calls[0][0].ndim != 2 for calls in seen.values()):
        return None  # a layer runs twice, or at several positions of a sample

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
