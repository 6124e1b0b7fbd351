"""Gaussians with a precision matrix over all parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import OptionError
from bflcore.lazy import lazy
from bflcore.posteriors.base import ExponentialFamily, standard_normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.layout import Layout
else:
    torch = lazy("torch")

__all__ = ["LARGEST", "DenseGaussian", "check_size", "cholesky"]

LARGEST = 4_000  # parameters: their precision matrix takes 128 MB in float64


@attrs.frozen(eq=False)
class DenseGaussian(ExponentialFamily):
    """A Gaussian with a precision matrix: parameters may be correlated.

    `mean` ``[..., P]``, `precision` ``[..., P, P]``, symmetric and positive definite. Products of
    densities are sums of natural parameters; only samples, divergences, densities and the way back
    from natural parameters factorise a matrix, in float64.

    The halves of a `split` have the diagonal blocks of the precision: each is the conditional of
    its coordinates given the mean of the others, and together they are the product of two densities
    that is nearest to the whole one under KL(product || whole) (Bishop 2006, eq. 10.12-10.15).
    """

    name = "dense-gaussian"
    matrices = ("precision",)

    mean: Tensor
    precision: Tensor

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> DenseGaussian:
        """Return means around 0 and precisions around 2; shared and personal ones are independent.

        (`split` inverts `join` for those alone.)
        """
        size = (clients, layout.total)
        root = standard_normal((*size, layout.total), noise)
        half = layout.split(torch.ones(layout.total))[0]
        shared = layout.join(half, half.new_zeros(layout.personal_total))
        precision = root @ root.mT / layout.total + torch.eye(layout.total)
        return cls(standard_normal(size, noise), precision * (shared == shared[:, None]))

    def natural(self) -> dict[str, Tensor]:
        """Return the precision ``[..., P, P]`` and the shift precision * mean ``[..., P]``."""
        return {"precision": self.precision, "shift": _times(self.precision, self.mean)}

    @classmethod
    def from_natural(cls, natural: Mapping[str, Tensor]) -> DenseGaussian:
        """Return the Gaussian with a precision ``[..., P, P]`` and a shift ``[..., P]``.

        Its mean is NaN, so that it is not valid, where the precision is not positive definite.
        """
        precision, shift = natural["precision"], natural["shift"]
        factor = cholesky(precision)
        mean = torch.cholesky_solve(shift.double().unsqueeze(-1), factor).squeeze(-1)
        return cls(mean.to(shift.dtype), precision)

    @property
    def covariance(self) -> Tensor:
        """The inverse of the precision ``[..., P, P]``."""
        return torch.cholesky_inverse(cholesky(self.precision)).to(self.precision.dtype)

    def variances(self) -> dict[str, Tensor]:
        """Return each parameter's variance given all others ``[..., P]``."""
        return {"conditional variance": self._diagonal().reciprocal()}

    def marginals(self) -> dict[str, Tensor]:
        """Return the mean and the marginal variance ``[..., P]``."""
        return {"mean": self.mean, "variance": self.covariance.diagonal(dim1=-2, dim2=-1)}

    def combinations(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and variances ``[M]`` of linear combinations of parameters.

        `matrix` ``[M, P]``; of one posterior ``[P]``.
        """
        wide: Tensor = torch.linalg.solve_triangular(
            cholesky(self.precision), matrix.double().mT, upper=False
        )
        return matrix @ self.mean, wide.square().sum(0).to(matrix.dtype)

    def log_density(self, parameters: Tensor) -> Tensor:
        """Return log N(parameters; mean, inverse of the precision) ``[...]``."""
        apart = parameters - self.mean
        squares = (_times(self.precision, apart) * apart).sum(-1)
        constant = self.mean.shape[-1] * math.log(2 * math.pi)
        log_determinant = _log_determinant(cholesky(self.precision)).to(squares.dtype)
        return 0.5 * (log_determinant - constant - squares)

    def invalid(self) -> str | None:
        """Return why this is not a Gaussian: not finite, or a matrix that is not a precision."""
        if reason := super().invalid():
            return reason
        size = self._diagonal().clamp_min(0).sqrt()
        allowed = (
            16 * torch.finfo(self.precision.dtype).eps * size.unsqueeze(-1) * size.unsqueeze(-2)
        )
        if bool(((self.precision - self.precision.mT).abs() > allowed).any()):
            return "precision is not symmetric"
        definite = bool(cholesky(self.precision).isfinite().all())
        return None if definite else "precision is not positive definite"

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + L^-T noise ``[..., P]``, where L L^T is the precision.

        Of one posterior ``[P]``, all draws ``[S, P]`` are computed at once.
        """
        one = self.mean.ndim == 1
        wide = noise.reshape(-1, len(self.mean)).mT if one else noise.unsqueeze(-1)
        upper = cholesky(self.precision).mT
        moved: Tensor = torch.linalg.solve_triangular(upper, wide.double(), upper=True)
        moved = moved.mT.reshape(noise.shape) if one else moved.squeeze(-1)
        return self.mean + moved.to(self.mean.dtype)

    def kl(self, other: DenseGaussian) -> Tensor:
        """Return KL(self || other) ``[...]`` in closed form.

        (tr(A' A^-1) - P + (mu - mu')^T A' (mu - mu') + log det A - log det A') / 2 for precisions
        A and A'.
        """
        mine, theirs = cholesky(self.precision), cholesky(other.precision)
        ratio: Tensor = torch.linalg.solve_triangular(mine, theirs, upper=False)
        trace = ratio.square().sum((-2, -1)) - self.mean.shape[-1]
        apart = (self.mean - other.mean).double()
        squares = (_times(other.precision.double(), apart) * apart).sum(-1)
        logs = _log_determinant(mine) - _log_determinant(theirs)
        return (0.5 * (trace + squares + logs)).to(self.mean.dtype)

    def _diagonal(self) -> Tensor:
        return self.precision.diagonal(dim1=-2, dim2=-1)


def check_size(layout: Layout) -> None:
    """Raise `OptionError` for more parameters than a precision matrix is kept of."""
    if layout.total > LARGEST:
        raise OptionError(
            f"--model: {layout.total:,} parameters are too many for the family dense-gaussian, "
            f"which keeps a number per pair; allowed: up to {LARGEST:,}; choose a smaller model, "
            "or an inference with another family (bfl list inference)"
        )


def cholesky(precision: Tensor) -> Tensor:
    """Return the lower factor ``[..., P, P]`` in float64; NaN where there is none."""
    repeated = precision.ndim > 2 and precision.stride(0) == 0  # as `expand` gives it
    once = precision[:1] if repeated else precision
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(once.double())
    return factor.masked_fill((failed != 0)[..., None, None], torch.nan).expand_as(precision)


def _log_determinant(factor: Tensor) -> Tensor:
    """Return the log determinant ``[...]`` of the matrix with this factor ``[..., P, P]``."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return ``[..., P, P]`` times ``[..., P]``."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
