"""Standardisation by sums over clients: mean 0 and variance 1 without pooling a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import attrs

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["Scaling", "moments"]

PREFIX = "scaling."  # of the sums in a survey
# A column whose deviation is this small a part of its size is constant: float32 resolves no more.
CONSTANT = 1e-6


def moments(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return count, sums and sums of squares ``[...]`` of one client's samples, in float64.

    `x` ``[n, ...]``; `y` ``[n]`` (labels, which are not scaled) or ``[n, T]`` (targets).
    """
    columns = {"x": x.double()} | ({"y": y.double()} if y.is_floating_point() else {})
    sums = {f"{PREFIX}{name}": column.sum(0) for name, column in columns.items()}
    squares = {f"{PREFIX}{name}2": column.square().sum(0) for name, column in columns.items()}
    return {f"{PREFIX}count": torch.tensor(len(x), device=x.device), **sums, **squares}


@attrs.frozen(eq=False)
class Scaling:
    """Means and deviations of features ``[...]`` and, of a regression, of targets ``[T]``.

    A constant column is only centred.
    """

    x: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, survey: Mapping[str, Tensor]) -> Self | None:
        """Return the scaling by the clients' summed `moments` ``[...]``; None without them."""
        if f"{PREFIX}count" not in survey:
            return None
        count = survey[f"{PREFIX}count"].clamp_min(1)

        def by(name: str) -> tuple[Tensor, Tensor]:
            mean, square = (survey[f"{PREFIX}{name}{power}"] / count for power in ("", "2"))
            variance = square - mean.square()
            constant = variance <= CONSTANT**2 * square
            return mean, variance.masked_fill(constant, 1).sqrt()

        return cls(by("x"), by("y") if f"{PREFIX}y" in survey else None)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return standardised samples ``[n, ...]`` and targets ``[n]`` or ``[n, T]``."""
        return self.features(x), y if self.y is None else _scaled(y, self.y)

    def features(self, x: Tensor) -> Tensor:
        """Return standardised samples ``[n, ...]``."""
        return _scaled(x, self.x)


def _scaled(values: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    mean, deviation = by
    return ((values - mean) / deviation).to(values.dtype)
