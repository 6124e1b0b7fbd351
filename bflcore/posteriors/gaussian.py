"""Gaussians with a variance for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bflcore.lazy import lazy
from bflcore.posteriors.base import ExponentialFamily, standard_normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.layout import Layout
else:
    torch = lazy("torch")

__all__ = ["Gaussian"]


@attrs.frozen(eq=False)
class Gaussian(ExponentialFamily):
    """A Gaussian with a mean and a variance for each parameter (mean field).

    `mean` and `variance` ``[..., P]``; a variance may be zero (a coordinate known for certain).
    """

    name = "gaussian"

    mean: Tensor
    variance: Tensor

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> Gaussian:
        """Return means around 0 and variances around 1."""
        size = (clients, layout.total)
        return cls(standard_normal(size, noise), standard_normal(size, noise).exp())

    def combinations(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and variances ``[M]`` of combinations ``[M, P]`` of the parameters."""
        return matrix @ self.mean, matrix.square() @ self.variance

    def natural(self) -> dict[str, Tensor]:
        """Return the precision 1/s and the shift mean/s ``[..., P]``."""
        precision = self.variance.reciprocal()
        return {"precision": precision, "shift": precision * self.mean}

    @classmethod
    def from_natural(cls, natural: Mapping[str, Tensor]) -> Gaussian:
        """Return the Gaussian with a precision and a shift ``[..., P]``."""
        variance = natural["precision"].reciprocal()
        return cls(natural["shift"] * variance, variance)

    def log_density(self, parameters: Tensor) -> Tensor:
        """Return the sum over coordinates of log N(parameter; mean, variance)."""
        squares = (parameters - self.mean).square() / self.variance
        return -0.5 * (squares + self.variance.log() + math.log(2 * math.pi)).sum(-1)

    def invalid(self) -> str | None:
        """Return why this is not a Gaussian: not finite, a variance below 0 or not invertible."""
        if reason := super().invalid():
            return reason
        if bool((self.variance < 0).any()):
            return "variance is negative"
        least = torch.finfo(self.variance.dtype).tiny  # below it an inverse overflows
        lost = (self.variance > 0) & (self.variance < least)
        return f"variance is below {least:.3g}, but not 0" if bool(lost.any()) else None

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + sqrt(variance) * noise ``[..., P]``."""
        return self.mean + self.variance.sqrt() * noise

    def kl(self, other: Gaussian) -> Tensor:
        """Return KL(self || other) ``[...]`` in closed form.

        Per coordinate: log(s'/s)/2 + (s + (mu - mu')^2) / (2 s') - 1/2. Two certain and equal
        coordinates contribute nothing; to a certain coordinate any other is infinitely far.
        """
        ratio = self.variance / other.variance
        shift = (self.mean - other.mean).square() / other.variance
        terms = 0.5 * (ratio - ratio.log() - 1 + shift)
        same = (self.variance == other.variance) & (self.mean == other.mean)
        certain = other.variance == 0
        return terms.masked_fill(certain, float("inf")).masked_fill(same, 0.0).sum(-1)
