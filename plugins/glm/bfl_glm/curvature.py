"""Loss, gradient and curvature of a client's samples, from derivatives by the network's outputs.

For outputs f(w) with Jacobian J_i of sample i, and derivatives g_i and h_i of its negative log
likelihood by its outputs,

    gradient = sum_i J_i^T g_i,        curvature = sum_i J_i^T h_i J_i

(the generalised Gauss-Newton matrix; Schraudolph 2002, eq. 10). Of a linear predictor it is the
Hessian X^T W X (McCullagh & Nelder 1989, section 2.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Problem
else:
    torch = lazy("torch")

__all__ = ["Expansion", "Piece", "expand", "loss", "pieces"]

NUMBERS = 4_000_000  # of the Jacobians that are in memory at a time


@attrs.frozen(eq=False)
class Expansion:
    """The second-order expansion of a client's loss around weights ``[P]``, in float64.

    `loss` is the sum over samples in nats, `gradient` ``[P]`` and `curvature` ``[P, P]`` its
    derivatives.
    """

    loss: float
    gradient: Tensor
    curvature: Tensor


def loss(problem: Problem, weights: Tensor, x: Tensor, y: Tensor) -> float:
    """Return the negative log likelihood of samples ``[N, ...]`` at `weights` ``[P]``, in nats."""
    if not len(x):
        return 0.0
    with torch.no_grad():
        outputs = problem.forward(weights[None], x[None])[0]
        return float(problem.likelihood.nll(outputs, y).sum())


def expand(problem: Problem, weights: Tensor, x: Tensor, y: Tensor) -> Expansion:
    """Expand the negative log likelihood of samples ``[N, ...]`` around `weights` ``[P]``."""
    size = len(weights)
    gradient, curvature = weights.new_zeros(size), weights.new_zeros(size, size)
    total = 0.0
    for piece in pieces(problem, weights, x, y):
        flat = piece.jacobian.flatten(0, 1)
        total += piece.loss
        gradient += piece.gradient()
        curvature += flat.T @ (piece.bend @ piece.jacobian).flatten(0, 1)
    return Expansion(total, gradient, (curvature + curvature.T) / 2)


@attrs.frozen(eq=False)
class Piece:
    """Some samples' derivatives, in float64.

    `loss` is their sum in nats, `jacobian` ``[n, C, P]`` that of the outputs by the weights;
    `slope` ``[n, C]`` and `bend` ``[n, C, C]`` are the loss's derivatives by the outputs.
    """

    loss: float
    jacobian: Tensor
    slope: Tensor
    bend: Tensor

    def gradient(self) -> Tensor:
        """Return the gradient of the samples' loss ``[P]``."""
        return self.jacobian.flatten(0, 1).T @ self.slope.flatten()

    def times(self, vectors: Tensor) -> Tensor:
        """Return the samples' curvature times `vectors` ``[P, M]``."""
        flat = self.jacobian.flatten(0, 1)
        rows = (flat @ vectors).unflatten(0, self.slope.shape)
        found: Tensor = flat.T @ (self.bend @ rows).flatten(0, 1)
        return found


def pieces(
    problem: Problem, weights: Tensor, x: Tensor, y: Tensor, numbers: int = NUMBERS
) -> Iterator[Piece]:
    """Yield the derivatives of samples ``[N, ...]`` at `weights` ``[P]``, as memory allows.

    Negative curvatures of a sample's loss by its outputs, which a likelihood with heavy tails has,
    count as zero.
    """
    first = 0
    network, likelihood, layout = problem.network, problem.likelihood, problem.layout

    def outputs(vector: Tensor, sample: Tensor) -> Tensor:
        tensors = layout.unflatten(vector)
        found: Tensor = torch.func.functional_call(network, tensors, (sample[None],))
        return found[0]

    def nll(output: Tensor, target: Tensor) -> Tensor:
        return likelihood.nll(output[None], target[None])[0]

    bends = torch.func.jacrev(torch.func.jacrev(nll))  # `hessian` would import the compiler
    while first < len(x):
        with torch.no_grad():
            made = problem.forward(weights[None], x[None, first : first + 1])[0]
        rows = slice(first, first + max(1, numbers // (made.numel() * len(weights))))
        first = rows.stop
        jacobian = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(weights, x[rows])
        with torch.no_grad():
            made = problem.forward(weights[None], x[None, rows])[0]
            total = float(likelihood.nll(made, y[rows]).sum())
        slope = torch.func.vmap(torch.func.grad(nll))(made, y[rows])
        bend = _positive(torch.func.vmap(bends)(made, y[rows]))
        yield Piece(total, jacobian, slope, bend)


def _positive(matrices: Tensor) -> Tensor:
    """Return symmetric matrices ``[n, C, C]`` without their negative eigenvalues."""
    if matrices.shape[-1] == 1:
        return matrices.clamp_min(0)
    values, vectors = torch.linalg.eigh(matrices)
    if bool((values >= -1e-12 * values.amax(-1, keepdim=True).clamp_min(1e-300)).all()):
        return matrices
    positive: Tensor = (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT
    return positive
