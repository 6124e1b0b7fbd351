"""Gaussians whose precision is a diagonal plus a matrix of low rank in a common basis.

    precision = diag(d) + B^T M B,        B [R, P],  M [R, R]

The basis B is structure: the same at every client, in the prior and in every round. Then d, M and
precision times mean are natural parameters: products of densities add them, whatever their number
and order, and the rank stays R. Everything else is computed from the eigenvectors of the scaled
low-rank part, in float64 and in O(P R^2):

    diag(d)^-1/2 B^T M B diag(d)^-1/2 = T diag(lambda) T^T,        T [P, R] with T^T T = 1

so that the covariance is diag(d)^-1/2 (1 - T diag(lambda / (1 + lambda)) T^T) diag(d)^-1/2
(Woodbury), its root the same with 1 - (1 + lambda)^-1/2, and the determinant a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

import attrs

from bflcore.lazy import lazy
from bflcore.posteriors.base import ROUNDING, ExponentialFamily, standard_normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.layout import Layout
else:
    torch = lazy("torch")

__all__ = ["LowRankGaussian"]

RANK = 2  # of `arbitrary`


@attrs.frozen(eq=False)
class LowRankGaussian(ExponentialFamily):
    """A Gaussian with a diagonal precision plus one of low rank in a basis common to all clients.

    `mean` and `diagonal` ``[..., P]``, `core` ``[..., R, R]``, symmetric, and `basis`
    ``[..., R, P]``: the precision is diag(diagonal) + basis^T core basis, positive definite, and so
    is the diagonal alone.

    Only shared parameters are correlated. The personal half of a `split` has the diagonal of their
    precision, and no basis.
    """

    name = "low-rank-gaussian"
    structure = ("basis",)
    matrices = ("core",)

    mean: Tensor
    diagonal: Tensor
    core: Tensor
    basis: Tensor

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> LowRankGaussian:
        """Return precisions around 2 in a basis of waves over the shared parameters."""
        size = (clients, layout.total)
        root = standard_normal((clients, RANK, RANK), noise)
        places = torch.arange(layout.shared_total, dtype=torch.float64)
        waves = torch.stack([((rank + 1) * (places + 0.5)).cos() for rank in range(RANK)])
        basis = layout.join(waves, waves.new_zeros(RANK, layout.personal_total))
        diagonal = standard_normal(size, noise).exp()
        core = root @ root.mT
        return cls(standard_normal(size, noise), diagonal, core, basis.expand(clients, -1, -1))

    def split(self, layout: Layout) -> tuple[Self, Self]:
        """Divide into the posterior over shared and the one over personal coordinates."""
        mean, basis = layout.split(self.mean), layout.split(self.basis)
        shared = layout.split(self.diagonal)[0]
        personal = layout.split(self._conditional())[1]
        return (
            type(self)(mean[0], shared, self.core, basis[0]),
            type(self)(mean[1], personal, torch.zeros_like(self.core), torch.zeros_like(basis[1])),
        )

    def join(self, personal: Self, layout: Layout) -> Self:
        """Put the shared coordinates (`self`) and the personal ones back together."""
        return type(self)(
            layout.join(self.mean, personal.mean),
            layout.join(self.diagonal, personal.diagonal),
            self.core,
            layout.join(self.basis, personal.basis),
        )

    def natural(self) -> dict[str, Tensor]:
        """Return `diagonal` ``[..., P]``, `core` ``[..., R, R]`` and precision * mean ``[..., P]``.

        They add up among posteriors with the same basis.
        """
        return {"diagonal": self.diagonal, "core": self.core, "shift": self.times(self.mean)}

    @classmethod
    def from_natural(cls, natural: Mapping[str, Tensor]) -> LowRankGaussian:
        """Return the Gaussian with these natural parameters and a `basis` ``[..., R, P]``.

        Its mean is NaN, so that it is not valid, where the precision is not positive definite.
        """
        shift, basis = natural["shift"], natural["basis"]
        # In place of the mean, which follows from the others.
        found = cls(shift, natural["diagonal"], natural["core"], basis)
        return attrs.evolve(found, mean=found.solve(shift))

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        """Return the Gaussian with these natural parameters ``[..., P]`` and this one's basis."""
        basis = self.basis.expand(*natural["shift"].shape[:-1], *self.basis.shape[-2:])
        found = self.from_natural({**natural, "basis": basis.to(natural["shift"].dtype)})
        return type(self).unpack(found.pack())

    def at_least(
        self, factor: Mapping[str, Tensor], least: Mapping[str, Tensor], mean: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return `factor` no less precise than `least`, and in how many directions it was ``[K]``.

        Diagonal and core are compared each by itself, which is enough for the whole. A core that
        falls short by less than the diagonal exceeds its bound is rounding, and stays. The mean of
        a client that was raised is `mean` ``[K, P]``.
        """
        diagonal, bound = factor["diagonal"], least["diagonal"] * (1 - ROUNDING)
        core, fewest = factor["core"], least["core"]
        low = diagonal < bound
        values, vectors = torch.linalg.eigh(core - fewest)
        size = torch.maximum(core.abs().amax((-2, -1)), fewest.abs().amax((-2, -1)))
        lacking = values < -ROUNDING * size.unsqueeze(-1)
        rows = lacking.any(-1).nonzero().flatten()
        if len(rows) and self.basis.shape[-1]:
            basis = self.basis.double().expand(len(core), *self.basis.shape[-2:])
            spare = (1 - bound / diagonal.abs()).amin(-1)
            scaled = basis[rows] * diagonal[rows].abs().rsqrt().unsqueeze(-2)
            largest = torch.linalg.matrix_norm(scaled @ scaled.mT, 2)
            made_up_for = -values[rows].amin(-1) * largest <= spare[rows] / 2
            lacking[rows] &= ~made_up_for.unsqueeze(-1)
        changed = low.any(-1) | lacking.any(-1)
        raised = LowRankGaussian(
            mean,
            torch.where(low, least["diagonal"], diagonal),
            fewest + (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT,
            self.basis.double(),
        ).natural()
        found = {
            name: torch.where(changed.view(-1, *[1] * (t.ndim - 1)), raised[name], t)
            for name, t in factor.items()
        }
        return found, low.sum(-1) + lacking.sum(-1)

    def times(self, vector: Tensor) -> Tensor:
        """Return the precision times `vector` ``[..., P]``."""
        rows = self.basis @ vector.unsqueeze(-1)
        return self.diagonal * vector + (self.basis.mT @ (self.core @ rows)).squeeze(-1)

    def solve(self, vector: Tensor) -> Tensor:
        """Return the covariance times `vector` ``[..., P]``; NaN where there is none."""
        return self.solver()(vector)

    def solver(self) -> Callable[[Tensor], Tensor]:
        """Return `solve` with its eigenvectors computed once, for many vectors ``[..., P]``."""
        rays, values = self._spectrum()
        root = self.diagonal.double().rsqrt()

        def solve(vector: Tensor) -> Tensor:
            found = _turned(rays, (1 + values).reciprocal(), root * vector.double())
            return (root * found).to(vector.dtype)

        return solve

    def variances(self) -> dict[str, Tensor]:
        """Return each parameter's variance given all others ``[..., P]``."""
        return {"conditional variance": self._conditional().reciprocal()}

    def marginals(self) -> dict[str, Tensor]:
        """Return the mean and the marginal variance ``[..., P]``."""
        return {"mean": self.mean, "variance": self._marginal().to(self.mean.dtype)}

    def combinations(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and variances ``[M]`` of linear combinations of parameters.

        `matrix` ``[M, P]``; of one posterior ``[P]``.
        """
        rays, values = self._spectrum()
        scaled = matrix.double() * self.diagonal.double().rsqrt()
        along = scaled @ rays
        across = (scaled - along @ rays.mT).square().sum(-1)
        variance = across + (along.square() / (1 + values)).sum(-1)
        return matrix @ self.mean, variance.to(matrix.dtype)

    def log_density(self, parameters: Tensor) -> Tensor:
        """Return log N(parameters; mean, inverse of the precision) ``[...]``."""
        apart = parameters - self.mean
        squares = (self.times(apart) * apart).sum(-1)
        constant = self.mean.shape[-1] * math.log(2 * math.pi)
        return 0.5 * (self._log_determinant().to(squares.dtype) - constant - squares)

    def invalid(self) -> str | None:
        """Return why this is not a Gaussian: not finite, or not a precision."""
        if reason := super().invalid():
            return reason
        if bool((self.diagonal <= 0).any()):
            return "diagonal is not positive"
        largest = self.core.abs().amax() if self.core.numel() else self.core.new_zeros(())
        allowed = 16 * torch.finfo(self.core.dtype).eps * largest
        if bool(((self.core - self.core.mT).abs() > allowed).any()):
            return "core is not symmetric"
        definite = bool(self._spectrum()[1].isfinite().all())
        return None if definite else "precision is not positive definite"

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + root of the covariance * noise ``[..., P]``.

        Of one posterior ``[P]``, all draws ``[S, P]`` are computed at once.
        """
        rays, values = self._spectrum()
        turned = _turned(rays, (1 + values).rsqrt(), noise.double())
        return self.mean + (self.diagonal.double().rsqrt() * turned).to(self.mean.dtype)

    def kl(self, other: LowRankGaussian) -> Tensor:
        """Return KL(self || other) ``[...]`` in closed form.

        (tr(A' A^-1) - P + (mu - mu')^T A' (mu - mu') + log det A - log det A') / 2 for precisions
        A and A' with the same basis B, where tr(A' A^-1) = sum d' / A^-1 + tr(M' B A^-1 B^T).
        """
        rows = self.basis.double()
        spread = rows @ self._columns(rows.mT)  # [..., R, R]
        trace = (other.diagonal.double() * self._marginal()).sum(-1)
        trace = trace + (other.core.double() * spread.mT).sum((-2, -1))
        apart = (self.mean - other.mean).double()
        squares = (other.map(lambda t: t.double()).times(apart) * apart).sum(-1)
        logs = self._log_determinant() - other._log_determinant()
        return (0.5 * (trace - self.mean.shape[-1] + squares + logs)).to(self.mean.dtype)

    def _conditional(self) -> Tensor:
        """Return the diagonal of the precision ``[..., P]``."""
        return self.diagonal + (self.basis * (self.core @ self.basis)).sum(-2)

    def _marginal(self) -> Tensor:
        """Return the diagonal of the covariance ``[..., P]`` in float64."""
        rays, values = self._spectrum()
        kept = 1 - (rays.square() * (values / (1 + values)).unsqueeze(-2)).sum(-1)
        return kept / self.diagonal.double()

    def _log_determinant(self) -> Tensor:
        """Return the log determinant of the precision ``[...]`` in float64."""
        return self.diagonal.double().log().sum(-1) + self._spectrum()[1].log1p().sum(-1)

    def _columns(self, matrix: Tensor) -> Tensor:
        """Return the covariance times the columns of `matrix` ``[..., P, M]``."""
        rays, values = self._spectrum()
        root = self.diagonal.double().rsqrt().unsqueeze(-1)
        scaled = root * matrix
        along = rays.mT @ scaled
        left = scaled - rays @ along
        return root * (left + rays @ (along / (1 + values).unsqueeze(-1)))

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Return T ``[..., P, R]`` and lambda ``[..., R]`` in float64 (see the module).

        lambda is NaN where the precision is not positive definite.
        """
        repeated = self.diagonal.ndim > 1 and self.diagonal.stride(0) == 0  # as `expand` gives it
        once = self[:1] if repeated else self
        root = once.diagonal.double().clamp_min(0).rsqrt()
        wide = (once.basis.double() * root.unsqueeze(-2)).mT
        sound = once.diagonal.gt(0).all(-1) & wide.isfinite().all(-1).all(-1)
        turned, upper = torch.linalg.qr(wide.masked_fill(~sound[..., None, None], 0.0))
        inner = upper @ once.core.double() @ upper.mT
        sound = sound & inner.isfinite().all(-1).all(-1)
        inner = inner.masked_fill(~sound[..., None, None], 0.0)
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        sound = sound.unsqueeze(-1) & (values > -1)
        rays, values = turned @ vectors, values.masked_fill(~sound, torch.nan)
        if not repeated:
            return rays, values
        size = len(self.diagonal)
        return rays.expand(size, -1, -1), values.expand(size, -1)


def _turned(rays: Tensor, factors: Tensor, vector: Tensor) -> Tensor:
    """Return (1 + T (diag(factors) - 1) T^T) times `vector` ``[..., P]``; `rays` are T."""
    along = (rays.mT @ vector.unsqueeze(-1)).squeeze(-1)
    left = vector - (rays @ along.unsqueeze(-1)).squeeze(-1)
    # Again: what rounding left along the rays would not be multiplied by a small factor.
    left = left - (rays @ (rays.mT @ left.unsqueeze(-1))).squeeze(-1)
    return left + (rays @ (factors * along).unsqueeze(-1)).squeeze(-1)
