"""How well a score ranks samples, from histograms that add up over batches and clients.

A score in [0, 1] falls into one of `bins` intervals, equally wide on the scale of log-odds: where
models are confident, scores differ in their distance from 0 and 1. Samples of one interval count as
tied. The area under the ROC curve of the histograms therefore differs from the exact one by at most
`resolution`, and by nothing where no interval holds both kinds of samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["FINEST", "auroc", "borders", "fpr95", "histograms", "resolution"]

FINEST = 100  # intervals of a histogram, unless there are many histograms
REACH = 12.0  # log-odds beyond which scores count as tied: 6e-6 from 0 or 1


def borders(bins: int) -> Tensor:
    """Return the log-odds ``[bins - 1]`` that divide the intervals; 0 (score 1/2) is among them."""
    return torch.linspace(-REACH, REACH, bins + 1, dtype=torch.float64)[1:-1]


def histograms(scores: Tensor, positive: Tensor, bins: int) -> Tensor:
    """Count C scores' samples per interval: int32 ``[C, 2, bins]``, negatives and positives.

    `scores` ``[B, C]`` lie in [0, 1]; `positive` ``[B, C]`` says which samples are positive. Scores
    that are not numbers count in the last interval.
    """
    columns = scores.shape[1]
    odds = torch.special.logit(scores.double()).contiguous()
    interval = torch.bucketize(odds, borders(bins).to(odds.device)).clamp_max(bins - 1)
    column = torch.arange(columns, device=odds.device)
    cell = (2 * column + positive.long()) * bins + interval
    counts = torch.bincount(cell.reshape(-1), minlength=2 * columns * bins)
    return counts.reshape(columns, 2, bins).int()


def auroc(counts: Tensor) -> Tensor:
    """Return the areas under the ROC curve ``[...]`` of histograms ``[..., 2, bins]``.

    The probability that a positive sample scores higher than a negative one, ties counting half;
    NaN where there is only one kind.
    """
    negative, positive = counts.double().unbind(-2)
    below = negative.cumsum(-1) - negative / 2
    return (positive * below).sum(-1) / (negative.sum(-1) * positive.sum(-1))


def resolution(counts: Tensor) -> Tensor:
    """Return how far `auroc` ``[...]`` may be from that of the scores themselves."""
    negative, positive = counts.double().unbind(-2)
    return (negative * positive).sum(-1) / (2 * negative.sum(-1) * positive.sum(-1))


def fpr95(counts: Tensor) -> Tensor:
    """Return the share ``[...]`` of positives among what accepts 95 % of the negatives.

    Samples are accepted below a score, the smallest border between two intervals below which at
    least 95 % of the negatives lie. For out-of-distribution scores: the share of foreign samples
    that pass as the client's own ("FPR at 95 % TPR", Hendrycks & Gimpel 2017's setting).
    """
    negative, positive = counts.long().unbind(-2)
    accepts = 100 * negative.cumsum(-1) >= 95 * negative.sum(-1, keepdim=True)
    first = accepts.int().argmax(-1, keepdim=True)
    return (positive.cumsum(-1).gather(-1, first).squeeze(-1)).double() / positive.sum(-1)
