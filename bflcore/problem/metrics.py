"""Metrics as sums that add up, so that figures pool exactly over batches and clients.

Law: ``figures(add(sums(a), sums(b))) == figures(sums(a and b together))``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = [
    "add",
    "classification_sums",
    "curve",
    "figures",
    "ood_auroc",
    "regression_sums",
    "retention",
    "summarise",
]

Sums = Mapping[str, "Tensor"]

CLIP = 1e-12  # smallest probability whose logarithm is taken
RETENTION_BINS = 100  # of normalised entropy; the retention curve's resolution
SPREAD = 1e-12  # of the sum of squares: a spread this small is rounding, not variation
INTERVALS = (50, 90, 95)  # per cent, of the predictive intervals whose coverage is counted


def classification_sums(probabilities: Tensor, labels: Tensor, bins: int = 10) -> dict[str, Tensor]:
    """Sum the metrics of class predictions.

    `probabilities` ``[S, B, C]``, one per parameter draw; `labels` ``[B]``. Figures are those of
    the mean predictive. Entropy is normalised by log C, mutual information is in nats; aleatoric
    and epistemic are the traces of Kwon et al. 2020, eq. 4, and add up to 1 - sum p^2. A batch of
    no samples gives zeros.
    """
    import torch

    draws = probabilities.double()
    p = draws.mean(0)
    classes = p.shape[1]
    confidence, top = p.max(1)
    hit = (top == labels).double()
    target = p.gather(1, labels[:, None])[:, 0]
    squares = p.square().sum(1)
    entropy = _entropy(p)
    aleatoric = (1 - draws.square().sum(2)).mean(0)
    sums = {
        "examples": hit.new_tensor(len(labels)),
        "hits": hit.sum(),
        "nll": -target.clamp_min(CLIP).log().sum(),
        "brier": (squares - 2 * target + 1).sum(),
        "entropy": entropy.sum() / math.log(classes),
        "aleatoric": aleatoric.sum(),
        "epistemic": (1 - squares - aleatoric).sum(),
        "mutual_information": (entropy - _entropy(draws).mean(0)).sum(),
    }
    if classes > 5:
        sums["top5"] = (p.topk(5, dim=1).indices == labels[:, None]).any(1).sum().double()
    # Bins are (lo, hi], found by comparison: 0.07 * 100 already rounds into the next bin. The
    # clamp keeps what is above 1 by rounding, or NaN, in the last.
    borders = torch.arange(1, bins + 1, dtype=p.dtype, device=p.device) / bins
    bin_of = torch.bucketize(confidence, borders).clamp_max(bins - 1)
    level = (entropy / math.log(classes) * RETENTION_BINS).long().clamp(0, RETENTION_BINS - 1)

    def histogram(index: Tensor, weights: Tensor, size: int) -> Tensor:
        return hit.new_zeros(size).index_add_(0, index, weights)

    ones = torch.ones_like(hit)
    return sums | {
        "bin_count": histogram(bin_of, ones, bins),
        "bin_confidence": histogram(bin_of, confidence, bins),
        "bin_hits": histogram(bin_of, hit, bins),
        "level_count": histogram(level, ones, RETENTION_BINS),
        "level_hits": histogram(level, hit, RETENTION_BINS),
    }


def regression_sums(mean: Tensor, variance: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Sum the metrics of predictions N(mean, variance), each ``[B, T]``, against `targets`."""
    mean, variance, y = mean.double(), variance.double(), targets.double()
    error = (y - mean).square()
    deviation = (error / variance).sqrt()
    density = 0.5 * (error / variance + (2 * math.pi * variance).log())
    sums = {
        "examples": y.new_tensor(len(y)),
        "values": y.new_tensor(y.numel()),
        "squared_error": error.sum(),
        "target": y.sum(0),
        "target_squared": y.square().sum(0),
        "nll": density.sum(),
    }
    for level in INTERVALS:
        reach = NormalDist().inv_cdf(0.5 + level / 200)
        sums[f"inside{level}"] = (deviation <= reach).double().sum()
    return sums


def add(left: Sums, right: Sums) -> dict[str, Tensor]:
    """Add two sums of the same kind."""
    return {name: left[name] + right[name] for name in left}


def figures(sums: Sums) -> dict[str, float]:
    """Return the metrics that the sums stand for; what is undefined is left out.

    Classification: accuracy, top5, nll, brier, ece, mce, entropy and its parts. Regression: rmse,
    nmse = sum (y - prediction)^2 / sum (y - mean y)^2 (undefined where targets do not vary), nll
    per value, coverage. Sums of no sample have no figures.
    """
    if not float(sums["examples"]):
        return {}
    return _regression(sums) if "squared_error" in sums else _classification(sums)


def _classification(sums: Sums) -> dict[str, float]:
    n = float(sums["examples"])
    means = ("nll", "brier", "entropy", "aleatoric", "epistemic", "mutual_information")
    result = {"accuracy": float(sums["hits"]) / n}
    if "top5" in sums:
        result["top5"] = float(sums["top5"]) / n
    result |= {name: float(sums[name]) / n for name in means}
    count = sums["bin_count"]
    gap = (sums["bin_hits"] - sums["bin_confidence"]).abs()
    filled = count > 0
    result["ece"] = float(gap.sum()) / n
    result["mce"] = float((gap[filled] / count[filled]).max())
    return result


def _regression(sums: Sums) -> dict[str, float]:
    n, values = float(sums["examples"]), float(sums["values"])
    spread = float((sums["target_squared"] - sums["target"].square() / n).sum())
    error = float(sums["squared_error"])
    # Below this, the spread is what rounding left of equal targets.
    varies = spread > SPREAD * float(sums["target_squared"].sum())
    return {
        "rmse": math.sqrt(error / values),
        **({"nmse": error / spread} if varies else {}),
        "nll": float(sums["nll"]) / values,
        **{f"coverage{level}": float(sums[f"inside{level}"]) / values for level in INTERVALS},
    }


def summarise(per_client: Sequence[Sums]) -> dict[str, dict[str, float]]:
    """Return each figure's mean and standard deviation over clients, and its pooled value.

    The mean is over the clients that have the figure; where none has, it is left out.
    """
    if not per_client:
        return {}
    each = [figures(sums) for sums in per_client]
    pooled = figures(reduce(add, per_client))
    held = {name: [one[name] for one in each if name in one] for name in pooled}
    return {
        name: {"mean": float(np.mean(of)), "std": float(np.std(of)), "pooled": pooled[name]}
        for name, of in held.items()
        if of
    }


def curve(sums: Sums) -> dict[str, list[float]]:
    """Return the reliability diagram: per bin the count, mean confidence and accuracy."""
    count = sums["bin_count"]
    safe = count.clamp_min(1)
    return {
        "count": count.tolist(),
        "confidence": (sums["bin_confidence"] / safe).tolist(),
        "accuracy": (sums["bin_hits"] / safe).tolist(),
    }


def retention(sums: Sums) -> dict[str, list[float]]:
    """Return accuracy against the fraction retained when the most uncertain are discarded.

    One point for each level of entropy that occurs, so each point keeps whole levels.
    """
    count, hits = sums["level_count"].cumsum(0), sums["level_hits"].cumsum(0)
    steps = (sums["level_count"] > 0).nonzero()[:, 0]
    return {
        "retained": (count[steps] / count[-1]).tolist(),
        "accuracy": (hits[steps] / count[steps]).tolist(),
    }


def ood_auroc(inside: npt.NDArray[np.float64], outside: npt.NDArray[np.float64]) -> float:
    """Return the chance that a sample from another data set is the more uncertain; ties are half.

    `inside` and `outside` are entropies of the test set and of the other data, both non-empty.
    """
    values = np.sort(inside)
    below = np.searchsorted(values, outside, side="left")
    until = np.searchsorted(values, outside, side="right")
    return float((below + until).mean() / 2 / len(values))


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp_min(CLIP).log()).sum(-1)
