"""The linearised Laplace posterior over a subnetwork of one client (FedSI, eq. 14-19).

R is the number of shared parameters, S that of the subnetwork. The posterior precision of the
subnetwork is H = A^T A + diag(1/g) with A = L^T J_S, where L L^T = Lambda is the curvature of the
negative log likelihood with respect to the outputs and g the prior variance.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from bfl_fedsi.jacobians import Jacobian, Linear, blocks
from bflcore import GaussianNoise, OptionError
from bflcore.inference.normals import Noise
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Problem
else:
    torch = lazy("torch")

__all__ = [
    "Subnetwork",
    "add_gram",
    "cholesky",
    "curvature_factor",
    "diagonal",
    "factorised",
    "infer",
    "infer_diagonal",
    "linearise",
    "match_moments",
    "numbers_held",
    "posterior_variance",
    "probit",
    "sample_outputs",
    "select",
    "weighted",
]

# Rows of A are dropped as long as all dropped rows together change every variance by less than this
# fraction: for a client that fits its samples well, few rows matter.
NEGLIGIBLE = 1e-5
STRIP = 512  # columns of the precision that are formed at a time
JITTERS = (1e-7, 1e-5, 1e-3)  # relative to the mean diagonal, tried in turn if Cholesky fails


@attrs.frozen(eq=False)
class Subnetwork:
    """A Gaussian over the shared parameters, degenerate outside the subnetwork.

    The covariance is diag(base) + sign * factor^T factor with `base` ``[R]``, `sign` 1 or -1, and
    `factor` ``[M, S]``, whose columns are the parameters `index` ``[S]`` in rising order.
    """

    index: Tensor
    base: Tensor
    factor: Tensor
    sign: float

    @property
    def variance(self) -> Tensor:
        """Marginal variances ``[R]``, computed without the covariance matrix."""
        gain = self.sign * torch.linalg.vecdot(self.factor, self.factor, dim=0)
        variance = self.base.index_add(0, self.index, gain)
        # If the data leave little of the prior variance, rounding may make it negative.
        return variance.maximum(self.base * torch.finfo(variance.dtype).eps)


def curvature_factor(problem: Problem, outputs: Tensor, noise: Tensor) -> Tensor:
    """Return L ``[B, O, O]`` with L L^T = Lambda, for `outputs` ``[B, O]``.

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
    """Yield L^T J block by block, at `weights` ``[P]`` for samples `x` ``[N, ...]``."""
    for block in blocks(problem, weights, x, width):
        yield block.times(curvature_factor(problem, block.outputs, noise))


def diagonal(problem: Problem, weights: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    """Return h ``[R]``, the diagonal of the Gauss-Newton matrix of the client's NLL."""
    h = weights.new_zeros(problem.layout.shared_total)
    for rows in weighted(problem, weights, x, noise, 1):
        h += rows.squares()
    return h


def posterior_variance(h: Tensor, g: Tensor) -> Tensor:
    """Return the variances ``[R]`` without correlations, 1 / (h + 1/g)."""
    return g / (h * g + 1)


def select(rule: str, h: Tensor, g: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the `count` parameters of the subnetwork, in rising order (eq. 14).

    The largest variances v minimise the squared 2-Wasserstein distance to the posterior without
    correlations. ``informative`` takes the largest h v, the contribution of each parameter's
    uncertainty to that of the outputs. Ties go to the first parameters.
    """
    variance = posterior_variance(h, g)
    if rule == "random":
        score = torch.rand(len(h), generator=generator, device=h.device)
    elif rule == "informative":
        score = h * variance
    elif rule == "curvature-aware":  # parameters without curvature come last
        score = torch.where(h > 0, variance, -1 / variance)
    else:
        score = variance
    return score.argsort(descending=True, stable=True)[:count].sort().values


def factorised(variance: Tensor) -> Subnetwork:
    """Return a diagonal Gaussian with these variances ``[R]``."""
    none = variance.new_zeros(0, dtype=torch.int64)
    return Subnetwork(none, variance, variance.new_zeros(0, 0), 1.0)


def infer_diagonal(h: Tensor, g: Tensor, index: Tensor) -> Subnetwork:
    """Return the posterior over the subnetwork `index` ``[S]`` without correlations."""
    base = torch.zeros_like(g).index_copy(0, index, posterior_variance(h, g)[index])
    return Subnetwork(index, base, g.new_zeros(0, len(index)), 1.0)


def infer(
    problem: Problem,
    weights: Tensor,
    x: Tensor,
    noise: Tensor,
    g: Tensor,
    index: Tensor,
    side: str,
) -> Subnetwork:
    """Return the posterior N(weights, H^-1) over the subnetwork `index` ``[S]`` (eq. 15).

    With A' = A diag(sqrt g) ``[M, S]`` and by Woodbury,

        H^-1 = diag(sqrt g) (I + A'^T A')^-1 diag(sqrt g)                (primal)
             = diag(g) - diag(sqrt g) A'^T (I + A' A'^T)^-1 A' diag(sqrt g)  (dual)

    `side` is ``primal``, ``dual``, or ``auto``: the smaller of M and S.
    """
    scale, count = g[index].sqrt(), len(index)
    rows: list[Tensor] = []  # A', without negligible rows
    layers: list[tuple[Linear, Tensor]] = []  # their factors, and which rows are kept
    primal = side == "primal"
    gram = scale.new_zeros(count, count) if primal else scale.new_zeros(0, 0)  # A'^T A'
    for block in weighted(problem, weights, x, noise, count):
        scaled, kept = _rows_that_matter(block, index, scale, len(x))
        rows.append(scaled)
        if isinstance(block, Linear):
            layers.append((block, kept))
        if side == "auto" and not primal and sum(map(len, rows)) > count:
            primal, gram = True, scale.new_zeros(count, count)
        while primal and rows:
            last = rows.pop()
            add_gram(gram, last)
    if primal:
        lower = cholesky(_plus_identity(gram))
        del gram  # as large as each of the three matrices that remain
        eye = torch.eye(count, dtype=g.dtype, device=g.device)
        factor = torch.linalg.solve_triangular(lower, eye, upper=False).mul_(scale)
        return Subnetwork(index, torch.zeros_like(g), factor, 1.0)
    whole = torch.cat([scale.new_zeros(0, count), *rows])
    del rows, scaled  # as large as `whole`
    lower = cholesky(_plus_identity(_products(whole, layers, index, scale)))
    factor = torch.linalg.solve_triangular(lower, whole, upper=False).mul_(scale)
    return Subnetwork(index, torch.zeros_like(g).index_copy(0, index, g[index]), factor, -1.0)


def add_gram(gram: Tensor, rows: Tensor) -> None:
    """Add rows^T rows to the lower triangle of `gram` ``[S, S]``, for `rows` ``[M, S]``.

    Cholesky reads only that, and forming it strip by strip takes half the arithmetic.
    """
    for first in range(0, len(gram), STRIP):
        strip = slice(first, first + STRIP)
        gram[first:, strip].addmm_(rows[:, first:].T, rows[:, strip])


def _rows_that_matter(
    block: Jacobian, index: Tensor, scale: Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of A' of one block that are not `NEGLIGIBLE`, and a mask of them."""
    scaled = block.columns(index).mul_(scale).flatten(0, 1)
    tolerance = NEGLIGIBLE / max(1, samples * block.outputs.shape[1])
    kept = torch.linalg.vecdot(scaled, scaled) > tolerance
    return scaled[kept], kept


def _products(
    rows: Tensor, layers: list[tuple[Linear, Tensor]], index: Tensor, scale: Tensor
) -> Tensor:
    """Return A' A'^T ``[M, M]``, through the factors of linear layers where possible (faster)."""
    if not layers:
        return rows @ rows.T
    scaled = rows * scale
    return torch.cat([block.dot(index, scaled).flatten(0, 1)[kept] for block, kept in layers])


def numbers_held(side: str, rows: int, count: int) -> int:
    """Return how many numbers `infer` has in memory at most, for `rows` M and `count` S."""
    primal, dual = 4 * count**2, 2 * rows * (rows + count)
    return {"primal": primal, "dual": dual, "auto": min(primal, dual)}[side]


def _plus_identity(matrix: Tensor) -> Tensor:
    matrix.diagonal().add_(1)
    return matrix


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor ``[S, S]``, with increasing jitter if it is needed.

    Warns about the jitter; raises `OptionError` if even the largest of `JITTERS` fails.
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
            f"{mean:.3g}) is not positive definite, even with {JITTERS[-1]:g} of its mean "
            "diagonal added; give a smaller prior variance, or --dtype float64"
        )
    return lower


def linearise(
    problem: Problem, weights: Tensor, subnetwork: Subnetwork, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return f ``[B, O]`` and its covariance J_S H^-1 J_S^T ``[B, O, O]`` (eq. 17)."""
    outputs, covariances = [], []
    index, factor, sign = subnetwork.index, subnetwork.factor, subnetwork.sign
    for block in blocks(problem, weights, x, max(1, min(STRIP, *factor.shape))):
        covariance = block.quadratic(subnetwork.base)
        for first in range(0, len(factor), STRIP):
            rows = factor[first : first + STRIP]
            # The rows of H^-1's own factor are 0 right of the diagonal.
            end = first + STRIP if sign > 0 else len(index)
            moved = block.dot(index[:end], rows[:, :end])
            covariance = covariance + sign * (moved @ moved.mT)
        outputs.append(block.outputs)
        covariances.append(covariance)
    return torch.cat(outputs), torch.cat(covariances)


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """Return logits f / sqrt(1 + pi/8 diag Sigma) ``[K, B, O]``.

    Eq. 18, normalised by a softmax (MacKay 1992).
    """
    return mean / (1 + math.pi / 8 * variance).sqrt()


def match_moments(mean: Tensor, variance: Tensor) -> Tensor:
    """Return two draws ``[K, 2, B, O]`` with this mean and variance ``[K, B, O]``."""
    spread = variance.sqrt()
    return torch.stack([mean - spread, mean + spread], dim=1)


def sample_outputs(
    mean: Tensor, covariance: Tensor, draws: int, streams: list[torch.Generator]
) -> Tensor:
    """Draw outputs ``[K, S, B, O]`` from N(mean, covariance).

    All samples of a client share the noise of a draw, so that the draws do not depend on how the
    samples are divided into blocks.
    """
    values, vectors = torch.linalg.eigh(covariance)
    # The symmetric root: unlike eigenvectors, it does not change sign with a rounding error.
    root = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT  # [K, B, O, O]
    noise = Noise(streams).fill(mean.new_empty(len(mean), draws, mean.shape[-1]))
    return mean[:, None] + torch.einsum("kboi,ksi->ksbo", root, noise)
