"""Barycentres of two diagonal Gaussians."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore import Gaussian

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GEOMETRIES", "barycentre"]

GEOMETRIES = ("reverse-kl", "wasserstein-2")


def barycentre(left: Gaussian, right: Gaussian, share: float, geometry: str) -> Gaussian:
    """Return the Gaussian ``[..., P]`` that is nearest to both on average.

    `right` has the weight `share`, and `left` the rest (Jamoussi et al. 2025). The reverse KL
    divergence averages natural parameters; the Wasserstein-2 distance means and standard
    deviations. Law: ``barycentre(p, q, 0) == p`` and ``barycentre(p, q, 1) == q``.
    """
    if share in {0, 1}:
        return right if share else left

    def mix(one: Tensor, other: Tensor) -> Tensor:
        return one * (1 - share) + other * share

    if geometry == "wasserstein-2":
        deviation = mix(left.variance.sqrt(), right.variance.sqrt())
        return Gaussian(mix(left.mean, right.mean), deviation.square())
    natural, others = left.natural(), right.natural()
    return Gaussian.from_natural({name: mix(natural[name], others[name]) for name in natural})
