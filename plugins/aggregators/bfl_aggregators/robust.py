"""Robust rules, which a minority of clients cannot move far: order statistics per parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore import Aggregator, Posterior, component, option
from bflcore.aggregation import COORDINATES, check_posteriors, slices
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    np, torch = lazy("numpy"), lazy("torch")

__all__ = ["Median", "TrimmedMean"]

UNVERIFIED = "the number of samples that a client claims cannot be verified"


@component
class Median(Aggregator):
    """Take the median over clients of each parameter's mean and of its variance.

    Disagreement between clients does not widen the result. Weights are ignored, since a client
    could claim any number of samples. For an even number of clients, the middle two are averaged.
    """

    name = "median"
    reference = "Yin et al. 2018, Algorithm 1, option I"
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})
    weighs = False
    ignores_weights_because = UNVERIFIED

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Trim all but the middle one or two values."""
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        cut = (len(weights) - 1) // 2
        return posteriors.map(lambda field: _trimmed_mean(field, cut))


@component
class TrimmedMean(Aggregator):
    """Average each parameter over clients without the extreme values.

    The ``floor(fraction * K)`` smallest and as many of the largest of K values are left out, for
    means and variances separately. Weights are ignored, as in `median`.
    """

    name = "trimmed-mean"
    reference = "Yin et al. 2018, Algorithm 1, option II"
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})
    weighs = False
    ignores_weights_because = UNVERIFIED

    fraction: float = option(
        0.1, "fraction of the clients left out at either end", at_least=0, below=0.5
    )

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Trim both ends."""
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        # 0.29 * 100 is 28.999... in binary, but 29 is meant.
        cut = int(self.fraction * len(weights) + 1e-9)
        return posteriors.map(lambda field: _trimmed_mean(field, cut))


def _trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """Average ``[K, P]`` over clients without the `cut` smallest and the `cut` largest values."""
    fused = values.new_empty(values.shape[1:])
    for chunk in slices(len(fused), COORDINATES):
        # NumPy sorts short rows ten times as fast as torch does.
        rows = np.sort(values[:, chunk].T.contiguous().cpu().numpy(), axis=1)
        middle = rows[:, cut : len(values) - cut].mean(axis=1, dtype=np.float64)
        fused[chunk] = torch.from_numpy(middle)
    return fused
