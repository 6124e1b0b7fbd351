"""Sites with a diagonal plus low-rank precision: for more parameters than a matrix allows.

All clients use one basis B [R, P], which the survey gives before round 1. Every client sends what
its curvature G_k makes of a random matrix, G_k Omega [P, S], and diag(G_k). The sums G Omega and
D = diag(G) show the range of the scaled pooled curvature D^-1/2 G D^-1/2 (a randomised range
finder; Halko, Martinsson & Tropp 2011, section 5.5, Nystroem), whose R first eigenvectors U give
B = U^T D^1/2. A client's site has the part of G_k in that range, and the diagonal of what is left:

    core_k = U^T D^-1/2 G_k D^-1/2 U,    diagonal_k = diag((1 - Pi)^T G_k (1 - Pi)),
    Pi = D^-1/2 U U^T D^1/2

This map is linear, so the sites' sum is what it makes of the pooled curvature, and neither needs
positive corrections. The mean is that of the client's exact curvature with the cavity, from
conjugate gradients: where all clients' means agree, theirs is the pooled mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from bfl_glm import newton
from bfl_glm.curvature import loss, pieces
from bfl_glm.sites import QuadraticSites
from bflcore import LowRankGaussian, component, option
from bflcore.lazy import lazy
from bflcore.randomness import SERVER, stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Cohort, Problem
else:
    torch = lazy("torch")

__all__ = ["LowRankLaplace", "common_basis", "expand"]

SKETCH, SCALE = "sketch", "curvature"  # the answers to the survey
MORE = 10  # columns of the random matrix beyond the rank (Halko et al. 2011, section 4.2)
KEPT = 20_000_000  # numbers of Jacobians that are kept for conjugate gradients, not recomputed
STEPS = 15  # to a client's own mode in one round; later rounds go on
LOST = 1e-12  # relative eigenvalues below it are rounding


@attrs.frozen(eq=False)
class Expansion:
    """The second-order expansion of a client's loss around weights, in float64.

    `loss` is the sum over samples in nats, `gradient` ``[P]`` its gradient; `diagonal` ``[P]`` and
    `core` ``[R, R]`` are the curvature as a site has it, and `times` applies it exactly.
    """

    loss: float
    gradient: Tensor
    diagonal: Tensor
    core: Tensor
    times: Callable[[Tensor], Tensor]


@component
class LowRankLaplace(QuadraticSites):
    """Approximate by a Gaussian with a diagonal plus low-rank precision, in a common basis.

    The mode is that of the pooled posterior, as with a full matrix, after more rounds; variances
    are those of the curvature's part of rank `rank`, and of the diagonal of the rest.
    """

    name = "low-rank-laplace"
    reference = (
        "new; Halko, Martinsson & Tropp 2011 (basis); sites: Bui et al. 2018, Smola et al. 2004"
    )
    family = "low-rank-gaussian"
    damps_the_mean_alone = True
    expected_failures = MappingProxyType(
        {
            "fits follow seed and round": "a fit is deterministic: the random matrix of the survey "
            "is drawn again for the basis of the personal parameters' prior, which is zero"
        }
    )

    rank: int = option(10, "rank of the correlated part of the precision (R)", at_least=1)
    damping: float = option(
        0.5, "share of its change of the mean that a client makes per round", above=0, at_most=1
    )
    momentum: float = option(
        0.5, "share of its last change of the mean that a client adds", at_least=0, below=1
    )

    def survey(self, problem: Problem, cohort: Cohort) -> Mapping[str, Tensor]:
        """Return the curvature's diagonal ``[K, P]`` and its image of a random matrix."""
        probe = self._probe(problem)
        shared = probe.any(1)
        diagonal = probe.new_zeros(len(cohort.sizes), len(probe))
        sketch = probe.new_zeros(len(cohort.sizes), *probe.shape)
        weights = problem.initial.double()
        for row, size in enumerate(cohort.sizes):
            x, y = _exact(cohort, row, size)
            for piece in pieces(problem, weights, x, y):
                bent = piece.bend @ piece.jacobian
                diagonal[row] += (piece.jacobian * bent).sum((0, 1))
                sketch[row] += piece.times(probe) * shared.unsqueeze(1)
        return {**super().survey(problem, cohort), SCALE: diagonal, SKETCH: sketch}

    def prior(self, problem: Problem) -> LowRankGaussian:
        """Return N(0, prior_sigma^2) ``[P]``, in the basis that the survey gave."""
        zeros, size = torch.zeros_like(problem.initial), self.rank
        basis = zeros.new_zeros(size, len(zeros))
        if SKETCH in problem.survey:
            sums = problem.survey[SKETCH], problem.survey[SCALE]
            basis = common_basis(*sums, self._probe(problem), size).to(zeros.dtype)
        diagonal = torch.full_like(zeros, self.prior_sigma**-2)
        return LowRankGaussian(zeros, diagonal, zeros.new_zeros(size, size), basis)

    def posterior_of(
        self, problem: Problem, start: Tensor, x: Tensor, y: Tensor, cavity: LowRankGaussian
    ) -> tuple[LowRankGaussian, float]:
        """Return the Gaussian ``[P]`` of the client's expanded loss, and its loss at the start."""
        scale = problem.survey[SCALE].to(start)
        dual = cavity.basis / scale.masked_fill(scale == 0, 1.0)
        return newton.posterior_of(
            start,
            len(x),
            partial(loss, problem, x=x, y=y),
            partial(_penalty, cavity=cavity),
            partial(expand, problem, x=x, y=y, basis=cavity.basis, dual=dual),
            partial(_updated, cavity=cavity),
            steps=STEPS,
        )

    def _probe(self, problem: Problem) -> Tensor:
        """Return the random matrix ``[P, S]`` that all clients use; 0 for personal parameters."""
        layout = problem.layout
        size = (layout.total, self.rank + MORE)
        noise = stream(problem.seed, 0, SERVER, "basis", problem.device)
        probe = torch.randn(size, generator=noise, dtype=torch.float64, device=problem.device)
        ones = probe.new_ones(layout.shared_total)
        return probe * layout.join(ones, ones.new_zeros(layout.personal_total)).unsqueeze(1)


def common_basis(sketch: Tensor, scale: Tensor, probe: Tensor, rank: int) -> Tensor:
    """Return the basis ``[rank, P]`` that the sums over all clients give, in float64.

    `sketch` ``[P, S]`` is the pooled curvature times `probe` ``[P, S]``, `scale` ``[P]`` its
    diagonal. Rows beyond the curvature's own rank are zero.
    """
    root = scale.clamp_min(0).sqrt()
    inner = probe.mT @ sketch
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    known = values > LOST * values.amax().clamp_min(torch.finfo(values.dtype).tiny)
    half = (sketch / root.masked_fill(root == 0, 1.0).unsqueeze(1)) @ (
        vectors[:, known] * values[known].rsqrt()
    )
    turned, sizes, _ = torch.linalg.svd(half, full_matrices=False)
    found = (turned[:, :rank] * root.unsqueeze(1)).mT
    found = found * (sizes[:rank].square() > LOST * sizes.square().sum()).unsqueeze(1)
    missing = rank - len(found)
    return torch.cat([found, found.new_zeros(missing, len(scale))]) if missing else found


def expand(
    problem: Problem, weights: Tensor, x: Tensor, y: Tensor, basis: Tensor, dual: Tensor
) -> Expansion:
    """Expand the loss of samples ``[N, ...]`` around `weights` ``[P]``.

    `basis` ``[R, P]`` spans the correlated part, and `dual` ``[R, P]`` gives its coordinates.
    """
    total, kept, numbers = 0.0, [], 0
    gradient, diagonal = torch.zeros_like(weights), torch.zeros_like(weights)
    core = weights.new_zeros(len(basis), len(basis))
    for piece in pieces(problem, weights, x, y):
        along = piece.jacobian @ dual.mT  # [n, C, R]
        rest = piece.jacobian - along @ basis
        total += piece.loss
        gradient += piece.gradient()
        core += along.flatten(0, 1).mT @ (piece.bend @ along).flatten(0, 1)
        diagonal += (rest * (piece.bend @ rest)).sum((0, 1))
        numbers += piece.jacobian.numel()
        kept.append(piece)
        if numbers > KEPT:
            kept.clear()

    def times(vector: Tensor) -> Tensor:
        again = kept if numbers <= KEPT else pieces(problem, weights, x, y)
        found = torch.zeros_like(vector)
        for piece in again:
            found += piece.times(vector.unsqueeze(1)).squeeze(1)
        return found

    return Expansion(total, gradient, diagonal.clamp_min(0), (core + core.mT) / 2, times)


def _updated(around: Expansion, point: Tensor, cavity: LowRankGaussian) -> LowRankGaussian:
    """Return the cavity ``[P]`` times the expansion: its mean exactly, its precision as a site."""
    found = attrs.evolve(
        cavity, diagonal=cavity.diagonal + around.diagonal, core=cavity.core + around.core
    )
    downhill = cavity.times(cavity.mean - point) - around.gradient
    step = newton.conjugate_gradients(
        lambda vector: cavity.times(vector) + around.times(vector), found.solver(), downhill
    )
    return attrs.evolve(found, mean=point + step)


def _penalty(weights: Tensor, cavity: LowRankGaussian) -> float:
    """Return minus the cavity's log density at `weights` ``[P]`` in nats, up to a constant."""
    apart = weights - cavity.mean
    return 0.5 * float(apart @ cavity.times(apart))


def _exact(cohort: Cohort, row: int, size: int) -> tuple[Tensor, Tensor]:
    """Return one client's samples and targets in float64."""
    x, y = cohort.x[row, :size].double(), cohort.y[row, :size]
    return x, y.double() if y.is_floating_point() else y
