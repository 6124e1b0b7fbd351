"""Histograms of scores: sketches that add up, and the conformal thresholds that they give.

A score is a number from 0 to infinity: the higher, the less the target fits its prediction. Bins
are equally wide in the score's logarithm, so that small scores are resolved as finely as large
ones. A bin stands for its upper end, for calibration samples and for new ones alike: that is
another score, and what holds for any score holds for it.
"""

from __future__ import annotations

import math
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


def thresholds(counts: Tensor, coverage: float, confidence: float = 0.0) -> Tensor:
    """Return per group the smallest bin ``[G]`` below which, or in it, a new score is likely.

    `counts` ``[G, BINS]`` may have weights for samples; a new sample has weight 1. With n samples
    the bin holds the k-th smallest, k = ceil(coverage * (n + 1)), and a new exchangeable one lies
    no higher with probability at least `coverage` (Vovk et al. 2005; Lei et al. 2018, theorem 2.2).
    It is BINS, above all scores, if k > n.

    With a `confidence` k is large enough that, for this share of draws of the calibration samples,
    that probability is at least `coverage` given the samples (Vovk 2012, proposition 2).
    """
    below = counts.double().cumsum(-1)
    due = torch.stack([_rank(n, coverage, confidence) for n in below[:, -1]])
    return torch.searchsorted(below, due[:, None])[:, 0]


def needed(coverage: float, confidence: float = 0.0) -> int:
    """Return the smallest number of samples for which `thresholds` are finite."""
    n = int(coverage / (1 - coverage))
    while coverage * (n + 1) - ROUNDING > n:
        n += 1
    return max(n, math.ceil(math.log1p(-confidence) / math.log(coverage)))


def _rank(n: Tensor, coverage: float, confidence: float) -> Tensor:
    """Return which of n scores, counted from the smallest, is the threshold ``[]``."""
    marginal = coverage * (n + 1) - ROUNDING
    if not confidence:
        return marginal
    # P(Beta(k, n + 1 - k) >= coverage) = P(Binomial(n, coverage) <= k - 1)
    whole = n.floor()
    hits = torch.arange(int(whole) + 1, dtype=n.dtype, device=n.device)
    ways = torch.lgamma(whole + 1) - torch.lgamma(hits + 1) - torch.lgamma(whole - hits + 1)
    logs = ways + hits * math.log(coverage) + (whole - hits) * math.log1p(-coverage)
    below = logs.exp().cumsum(0)[:-1]  # of k - 1 = 0 .. n - 1
    return torch.maximum(marginal, 1.0 + torch.searchsorted(below, n.new_tensor(confidence)))


def upper_ends(bins: Tensor) -> Tensor:
    """Return the upper ends ``[...]`` of bins ``[...]`` in float64; infinite for the last."""
    ends = _log_ends(bins).exp()
    return torch.cat([ends, ends.new_full((2,), torch.inf)])[bins]


def _log_ends(like: Tensor) -> Tensor:
    return torch.linspace(-RANGE, RANGE, BINS - 1, dtype=torch.float64, device=like.device)
