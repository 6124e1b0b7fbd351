"""Weights from how far posteriors are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from bflcore import Broadcast, Gaussian
from bflcore.aggregation import COORDINATES, blocks

__all__ = ["distance_weights", "divergences", "max_discrepancy_weights"]

# Nats. Identical posteriors weigh as if they were this far apart, infinitely distant ones (one is
# certain where another is not) as if they were that far: weights stay positive and finite, and
# where all divergences are zero, or all infinite, they are equal.
NEAREST, FARTHEST = 1e-12, 1e100


def distance_weights(posteriors: Gaussian, broadcast: Broadcast) -> Tensor:
    """Return 1 / KL(q_k || start) ``[K]``."""
    start = broadcast.start
    assert isinstance(start, Gaussian)  # noqa: S101 - the registry admits no other family
    apart = torch.zeros(len(posteriors.mean), dtype=torch.float64, device=posteriors.mean.device)
    for part in blocks(len(start.mean), COORDINATES):
        apart += _on(posteriors, part).kl(_on(start, part))
    return _inverse(apart)


def max_discrepancy_weights(posteriors: Gaussian, direction: str, over: str) -> Tensor:
    """Return 1 / d_k ``[K]``, where d_k is the sum or maximum of a row (column) of KLs."""
    apart = divergences(posteriors)
    apart = apart if direction == "to-others" else apart.T
    return _inverse(apart.sum(1) if over == "sum" else apart.amax(1))


def divergences(posteriors: Gaussian) -> Tensor:
    """Return KL(q_k || q_j) ``[K, K]`` in nats, row k, column j; K^2 P steps."""
    clients, parameters = posteriors.mean.shape
    apart = posteriors.mean.new_zeros(clients, clients, dtype=torch.float64)
    for part in blocks(parameters, COORDINATES):
        everybody = _on(posteriors, part)
        for k in range(clients):
            apart[k] += everybody[k].kl(everybody)
    return apart


def _on(posterior: Gaussian, part: slice) -> Gaussian:
    """Return the posterior over some coordinates, in float64."""
    return posterior.map(lambda tensor: tensor[..., part].double())


def _inverse(divergence: Tensor) -> Tensor:
    return divergence.clamp(NEAREST, FARTHEST).reciprocal()
