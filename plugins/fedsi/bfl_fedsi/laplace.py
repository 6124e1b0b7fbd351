"""The linearised Laplace posterior over a subnetwork of one client (FedSI, eq. 14-19).

R counts the travelling parameters, S those of the subnetwork. The posterior precision of the
subnetwork is H = A^T A + diag(1/g) with A = L^T J_S, where L L^T = Lambda is the curvature of the
negative log likelihood in the outputs and g the prior variance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bfl_fedsi.jacobians import Jacobian, Linear, blocks
from bflcore import GaussianNoise, OptionError, Problem

if TYPE_CHECKING:
    from bfl_fedsi.plugin import SubnetworkLaplace

__all__ = [
    "Subnetwork",
    "cholesky",
    "curvature_factor",
    "diagonal",
    "infer",
    "linearised",
    "posterior_variance",
    "select",
    "size",
]

# Rows of A are dropped while, all of them together, they could change no variance by more than
# this fraction: a client that fits its samples well has few rows that matter.
NEGLIGIBLE = 1e-5
JITTERS = (1e-7, 1e-5, 1e-3)  # of the mean diagonal, tried in turn where Cholesky fails


@attrs.frozen(eq=False)
class Subnetwork:
    """A Gaussian over the travelling parameters, degenerate outside the subnetwork.

    Covariance diag(base) + sign * factor^T factor, the factor's columns being the parameters
    `index` ``[S]``, in rising order; `base` ``[R]``, `factor` ``[M, S]``, `sign` 1 or -1.
    """

    index: Tensor
    base: Tensor
    factor: Tensor
    sign: float

    @property
    def variance(self) -> Tensor:
        """Marginal variances ``[R]``; the covariance is not formed for them."""
        gain = self.sign * torch.linalg.vecdot(self.factor, self.factor, dim=0)
        variance = self.base.index_add(0, self.index, gain)
        # Where the data leave little of the prior, rounding may leave less than nothing.
        return variance.maximum(self.base * torch.finfo(variance.dtype).eps)


def curvature_factor(problem: Problem, outputs: Tensor, noise: Tensor) -> Tensor:
    """Return L ``[B, O, O]`` with L L^T = Lambda.

    Softmax: Lambda = diag(p) - p p^T and L = diag(sqrt p) - p sqrt(p)^T. Regression: Lambda =
    1/noise.
    """
    if isinstance(problem.likelihood, GaussianNoise):
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        return (eye / noise.sqrt()).expand(len(outputs), -1, -1)
    p = outputs.softmax(1)
    root = p.sqrt()
    return root.diag_embed() - p[:, :, None] * root[:, None]


def weighted(
    problem: Problem, weights: Tensor, x: Tensor, noise: Tensor, width: int
) -> Iterator[Jacobian]:
    """Yield L^T J block by block."""
    for block in blocks(problem, weights, x, width):
        yield block.times(curvature_factor(problem, block.outputs, noise))


def diagonal(problem: Problem, weights: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    """Return h ``[R]``, the diagonal of the Gauss-Newton matrix of the client's NLL."""
    h = weights.new_zeros(problem.layout.shared_total)
    for rows in weighted(problem, weights, x, noise, 1):
        h += rows.squares()
    return h


def posterior_variance(h: Tensor, g: Tensor) -> Tensor:
    """Return the marginal variances under independence, 1 / (h + 1/g) ``[R]``."""
    return g / (h * g + 1)


def size(inference: SubnetworkLaplace, problem: Problem) -> int:
    """Return |S| = E |R|, rounded, at least 1."""
    return max(1, round(inference.fraction * problem.layout.shared_total))


def select(rule: str, h: Tensor, g: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the `count` parameters of the subnetwork, in rising order (eq. 14).

    The largest marginal variances v minimise the squared 2-Wasserstein distance to the posterior
    under independence. ``informative`` takes the largest h v: what each parameter's uncertainty
    is worth in the outputs. Of equal ones the first are taken.
    """
    variance = posterior_variance(h, g)
    if rule == "random":
        score = torch.rand(len(h), generator=generator, device=h.device)
    elif rule == "informative":
        score = h * variance
    elif rule == "curvature-aware":  # parameters without curvature if no other is left
        score = torch.where(h > 0, variance, -1 / variance)
    else:
        score = variance
    return score.argsort(descending=True, stable=True)[:count].sort().values


def infer(
    inference: SubnetworkLaplace,
    problem: Problem,
    weights: Tensor,
    x: Tensor,
    noise: Tensor,
    g: Tensor,
    generator: torch.Generator,
    rule: str,
) -> Subnetwork:
    """Select a subnetwork at `weights` ``[P]`` by `rule` and infer its posterior (eq. 14, 15)."""
    h = diagonal(problem, weights, x, noise)
    index = select(rule, h, g, size(inference, problem), generator)
    if inference.covariance == "diagonal":
        variance = torch.zeros_like(g).index_copy(0, index, posterior_variance(h, g)[index])
        return Subnetwork(index, variance, g.new_zeros(0, len(index)), 1.0)
    scale = g[index].sqrt()
    rows, products, gram = _rows(inference.covariance, problem, weights, x, noise, index, scale)
    # With A' = A diag(sqrt g): H^-1 = diag(sqrt g) (I + A'^T A')^-1 diag(sqrt g), and by Woodbury
    # (I + A'^T A')^-1 = I - A'^T (I + A' A'^T)^-1 A'.
    if gram is None:
        lower = cholesky(_plus_identity(products()))
        factor = torch.linalg.solve_triangular(lower, rows, upper=False).mul_(scale)
        return Subnetwork(index, torch.zeros_like(g).index_copy(0, index, g[index]), factor, -1.0)
    lower = cholesky(_plus_identity(gram))
    del gram
    eye = torch.eye(len(index), dtype=g.dtype, device=g.device)
    factor = torch.linalg.solve_triangular(lower, eye, upper=False).mul_(scale)
    return Subnetwork(index, torch.zeros_like(g), factor, 1.0)


def _rows(
    side: str,
    problem: Problem,
    weights: Tensor,
    x: Tensor,
    noise: Tensor,
    index: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Callable[[], Tensor], Tensor | None]:
    """Return A' ``[M, S]`` and what computes A' A'^T, or A'^T A' ``[S, S]``.

    The latter on the primal side, or once A' has become the larger of the two.
    """
    count = len(index)
    kept: list[Tensor] = []
    sources: list[tuple[Linear, Tensor]] = []
    gram = scale.new_zeros(count, count) if side == "primal" else None
    tolerance = 0.0
    for block in weighted(problem, weights, x, noise, count):
        rows = block.columns(index).mul_(scale).flatten(0, 1)
        tolerance = tolerance or NEGLIGIBLE / max(1, len(x) * block.outputs.shape[1])
        matters = torch.linalg.vecdot(rows, rows) > tolerance
        rows = rows[matters]
        if isinstance(block, Linear):
            sources.append((block, matters))
        if gram is not None:
            gram.addmm_(rows.T, rows)
            continue
        kept.append(rows)
        if side == "auto" and sum(map(len, kept)) > count:
            gram = scale.new_zeros(count, count)
            while kept:
                gram.addmm_(kept[-1].T, kept.pop())
    rows = torch.cat([scale.new_zeros(0, count), *kept])

    def products() -> Tensor:
        if not sources:
            return rows @ rows.T
        scaled = rows * scale
        return torch.cat([block.dot(index, scaled).flatten(0, 1)[m] for block, m in sources])

    return rows, products, gram


def _plus_identity(matrix: Tensor) -> Tensor:
    matrix.diagonal().add_(1)
    return matrix


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower factor of a symmetric matrix, with a rising jitter where it needs one.

    Warns of the jitter; raises `OptionError` when none of `JITTERS` helps.
    """
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(matrix)
    mean = float(matrix.diagonal().mean())
    for jitter in JITTERS:
        if not failed:
            break
        shifted = matrix.clone()
        shifted.diagonal().add_(jitter * mean)
        lower, failed = torch.linalg.cholesky_ex(shifted)
        if not failed:
            warnings.warn(
                f"the precision of a subnetwork of {len(matrix)} was not positive definite; "
                f"{jitter:g} of its mean diagonal was added",
                RuntimeWarning,
                stacklevel=2,
            )
    if failed:
        raise OptionError(
            f"inference.prior_variance: the posterior precision ({len(matrix)} rows, mean diagonal "
            f"{mean:.3g}) is not positive definite, not even with {JITTERS[-1]:g} of its mean "
            "diagonal added; give a smaller prior variance, or --dtype float64"
        )
    return lower


def linearised(
    problem: Problem, weights: Tensor, subnetwork: Subnetwork, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return f ``[B, O]`` and its covariance J_S H^-1 J_S^T ``[B, O, O]`` (eq. 17)."""
    outputs, covariances = [], []
    for block in blocks(problem, weights, x, max(1, *subnetwork.factor.shape)):
        covariance = block.quadratic(subnetwork.base)
        if len(subnetwork.factor):
            moved = block.dot(subnetwork.index, subnetwork.factor)
            covariance = covariance + subnetwork.sign * (moved @ moved.mT)
        outputs.append(block.outputs)
        covariances.append(covariance)
    return torch.cat(outputs), torch.cat(covariances)
