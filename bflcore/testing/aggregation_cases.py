"""Inputs of fusion rules: fixed cases, small and extreme, or large."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor

from bflcore.aggregation import Aggregator
from bflcore.posteriors import Gaussian, Point, Posterior

__all__ = ["Case", "cases", "with_mean"]


@attrs.frozen(eq=False)
class Case:
    """One input of a fusion: posteriors ``[K, P]``, weights ``[K]`` and their prior ``[P]``."""

    posteriors: Posterior
    weights: Tensor
    prior: Posterior

    def fused_by(self, rule: Aggregator) -> Posterior:
        """Return the case fused by `rule` ``[P]``."""
        return rule.fuse(self.posteriors, self.weights, self.prior)

    def rows(self, rows: list[int]) -> Case:
        """Select clients, in the given order."""
        return Case(self.posteriors[rows], self.weights[rows], self.prior)

    def map_means(self, function: Callable[[Tensor], Tensor]) -> Case:
        """Apply a function to the means of clients and prior."""
        return Case(
            with_mean(self.posteriors, function), self.weights, with_mean(self.prior, function)
        )


# More clients and parameters than a rule may take in at once (`bflcore.aggregation.CLIENTS`,
# `COORDINATES`), and than somebody would notice.
LARGE = ((150, 40), (2, 17_000))


def cases(families: tuple[str, ...] = ("gaussian",)) -> Iterator[Case]:
    """Yield fixed cases: K from 1 to 150, precisions over 24 decades, zeros, uneven weights."""
    for dtype in (torch.float64, torch.float32):
        for seed, clients in enumerate((1, 2, 3, 7, 50)):
            for decades, zeros in ((1.0, 0.0), (12.0, 0.0), (2.0, 0.3)):
                yield from _cases(families, dtype, seed, (clients, 5), decades, zeros)
    for size in LARGE:
        yield from _cases(families, torch.float32, 0, size, 1.0, 0.0)


def _cases(
    families: tuple[str, ...],
    dtype: torch.dtype,
    seed: int,
    size: tuple[int, int],
    decades: float,
    zeros: float,
) -> Iterator[Case]:
    noise = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(size, generator=noise, dtype=torch.float64)
    power = decades * (2 * torch.rand(size, generator=noise, dtype=torch.float64) - 1)
    certain = torch.rand(size, generator=noise) < zeros
    variance = (10**power).masked_fill(certain, 0.0).to(dtype)
    weights = 10 ** (4 * torch.rand(size[0], generator=noise, dtype=torch.float64) - 3)
    prior = torch.randn(size[1], generator=noise, dtype=torch.float64).to(dtype)
    if "gaussian" in families:
        start = Gaussian(prior, 1.5 * variance.amax(0))
        yield Case(Gaussian(mean.to(dtype), variance), weights, start)
    if "point" in families:
        yield Case(Point(mean.to(dtype)), weights, Point(prior))


def with_mean(posterior: Posterior, function: Callable[[Tensor], Tensor]) -> Posterior:
    """Return the posterior with `function` applied to its mean ``[..., P]``."""
    return type(posterior).unpack(posterior.pack() | {"mean": function(posterior.mean)})
