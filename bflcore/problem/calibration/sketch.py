"""Histograms of scores: sketches that add up, and the conformal thresholds that they give.

A score is a number from 0 to infinity: the higher, the less the target fits its prediction. Bins are
equally wide in the score's logarithm, so that small scores are resolved as finely as large ones. A
bin stands for its upper end, for calibration samples and for new ones alike: that is another score,
and what holds for any score holds for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["BINS", "bins_of", "histogram", "needed", "thresholds", "upper_ends"]

BINS = 2048  # 16 kB per histogram; neighbouring ends differ by 1.6 %
RANGE = 16.0  # the ends lie between exp(-16) and exp(16); the last bin has none
ROUNDING = 1e-9  # in samples: coverage * (n + 1) may exceed a whole number by rounding


def bins_of(scores: Tensor) -> Tensor:
    """Return the bins ``[...]`` of scores ``[...]``; NaN is in the last one."""
    ends = _log_ends(scores)
    found = torch.bucketize(scores.double().log(), ends)
    return found.masked_fill(scores.isnan(), BINS - 1)


def histogram(scores: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return how many scores ``[B]`` of each of `count` groups are in each bin ``[G, BINS]``."""
    index = groups * BINS + bins_of(scores)
    return torch.bincount(index, minlength=count * BINS).reshape(count, BINS)


def thresholds(counts: Tensor, coverage: float) -> Tensor:
    """Return per group the smallest bin ``[G]`` below which, or in it, a new score is likely.

    `counts` ``[G, BINS]`` may have weights for samples; a new sample has weight 1. With n samples
    the bin holds the k-th smallest, k = ceil(coverage * (n + 1)), and a new exchangeable one lies
    no higher with probability at least `coverage` (Vovk et al. 2005; Lei et al. 2018, theorem 2.2).
    It is BINS, above all scores, if k > n.
    """
    below = counts.double().cumsum(-1)
    due = coverage * (below[:, -1:] + 1) - ROUNDING
    return torch.searchsorted(below, due)[:, 0]


def needed(coverage: float) -> int:
    """Return the smallest number of samples for which `thresholds` are finite."""
    n = int(coverage / (1 - coverage))
    while coverage * (n + 1) - ROUNDING > n:
        n += 1
    return n


def upper_ends(bins: Tensor) -> Tensor:
    """Return the upper ends ``[...]`` of bins ``[...]`` in float64; infinite for the last."""
    ends = _log_ends(bins).exp()
    return torch.cat([ends, ends.new_full((2,), torch.inf)])[bins]


def _log_ends(like: Tensor) -> Tensor:
    return torch.linspace(-RANGE, RANGE, BINS - 1, dtype=torch.float64, device=like.device)
