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


def moments(x: Tensor, y: Tensor, indicators: Tensor | None = None) -> dict[str, Tensor]:
    """Return count, sums and sums of squares ``[...]`` of one client's samples, in float64.

    `x` ``[n, ...]``; `y` ``[n]`` (labels, which are not scaled) or ``[n, T]`` (targets). With
    `indicators` (see `Scaling.of`), NaN is a missing value: it is left out, and counted.
    """
    columns = {"x": x.double()} | ({"y": y.double()} if y.is_floating_point() else {})
    found = {f"{PREFIX}count": torch.tensor(len(x), device=x.device)}
    if indicators is not None:
        found[f"{PREFIX}missing"] = columns["x"].isnan().sum(0)
        columns["x"] = columns["x"].nan_to_num(0.0)
    sums = {f"{PREFIX}{name}": column.sum(0) for name, column in columns.items()}
    squares = {f"{PREFIX}{name}2": column.square().sum(0) for name, column in columns.items()}
    return {**found, **sums, **squares}


@attrs.frozen(eq=False)
class Scaling:
    """Means and deviations of features ``[...]`` and, of a regression, of targets ``[T]``.

    A constant column is only centred. A missing value, NaN, becomes the mean: 0 once it is scaled.
    """

    x: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, survey: Mapping[str, Tensor], indicators: Tensor | None = None) -> Self | None:
        """Return the scaling by the clients' summed `moments` ``[...]``; None without them.

        `indicators` ``[...]`` says which features of a table are 0 or 1. They stay as they are,
        except one that was 1 in no training sample: it is always 0, for nothing was learnt of it.
        """
        if f"{PREFIX}count" not in survey:
            return None
        total = survey[f"{PREFIX}count"]

        def by(name: str, count: Tensor) -> tuple[Tensor, Tensor]:
            sums = (survey[f"{PREFIX}{name}{power}"] for power in ("", "2"))
            mean, square = (one / count.clamp_min(1) for one in sums)
            variance = square - mean.square()
            constant = variance <= CONSTANT**2 * square
            return mean, variance.masked_fill(constant, 1).sqrt()

        x = by("x", total - survey.get(f"{PREFIX}missing", 0))
        if indicators is not None:
            mean, deviation = x
            never = torch.where(survey[f"{PREFIX}x"] > 0, 1.0, torch.inf).to(deviation)
            x = mean.masked_fill(indicators, 0), torch.where(indicators, never, deviation)
        return cls(x, by("y", total) if f"{PREFIX}y" in survey else None)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return standardised samples ``[n, ...]`` and targets ``[n]`` or ``[n, T]``."""
        return self.features(x), y if self.y is None else _scaled(y, self.y)

    def features(self, x: Tensor) -> Tensor:
        """Return standardised samples ``[n, ...]``."""
        scaled = _scaled(x, self.x)
        return scaled.masked_fill(scaled.isnan(), 0)


def _scaled(values: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    mean, deviation = by
    return ((values - mean) / deviation).to(values.dtype)
