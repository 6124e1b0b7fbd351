"""Metrics as sums, which pool exactly over batches and clients.

Law: ``metrics_of(add(sums(a), sums(b))) == metrics_of(sums(a and b together))``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from bflcore.problem import ranking

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "add",
    "class_metrics",
    "classification_sums",
    "entropies",
    "metrics_of",
    "per_sample",
    "regression_sums",
    "reliability_diagram",
    "retention_curve",
    "selective_risk",
    "summarise",
    "uncertainties",
]

Sums = Mapping[str, "Tensor"]

MEANS = (  # classification metrics that are means over samples; their sums have the same names
    *("accuracy", "top5", "nll", "brier", "entropy", "aleatoric", "epistemic"),
    "mutual_information",
)
CLIP = 1e-12  # smallest probability whose logarithm is taken
RETENTION_BINS = 100  # bins of normalised entropy: the resolution of the retention curve
RANKS = (16, 2000)  # intervals per class for AUROC: at least, and of all classes together
SPREAD = 1e-12  # relative to the sum of squares: a smaller spread is rounding error
PER_SAMPLE = "mean."  # prefix of sums of figures whose mean over samples is a metric
INTERVALS = (50, 90, 95)  # predictive intervals whose coverage is counted, in per cent


def classification_sums(
    probabilities: Tensor,
    labels: Tensor,
    bins: int = 10,
    closed_form: Tensor | None = None,
    *,
    by_class: bool = True,
) -> dict[str, Tensor]:
    """Sum the metrics of class predictions.

    `probabilities` ``[S, B, C]`` are those of S parameter draws, `labels` ``[B]``. The prediction
    p is the draws' mean, or `closed_form` ``[B, C]`` if given. Entropy is normalised by log C. The
    decomposition of uncertainty always refers to the draws: mutual information is in nats, and
    aleatoric and epistemic are the traces of Kwon et al. 2020, eq. 4, which add up to 1 - sum p^2
    for the mean of the draws. An empty batch gives zeros. `by_class` adds the confusion matrix
    ``[C, C]`` (row: label, column: prediction) and, of each class against the rest, the histograms
    of its probability ``[C, 2, R]`` (see `ranking`).
    """
    import torch

    draws = probabilities.double()
    p = draws.mean(0) if closed_form is None else closed_form.double()
    classes = p.shape[1]
    confidence, top = p.max(1)
    hit = (top == labels).double()
    target = p.gather(1, labels[:, None])[:, 0]
    squares = p.square().sum(1)
    uncertain = uncertainties(draws, p)
    entropy = uncertain.pop("entropy")
    sums = {
        "examples": hit.new_tensor(len(labels)),
        "accuracy": hit.sum(),
        "nll": -target.clamp_min(CLIP).log().sum(),
        "brier": (squares - 2 * target + 1).sum(),
        "entropy": entropy.sum() / math.log(classes),
        **{name: values.sum() for name, values in uncertain.items()},
    }
    if classes > 5:
        sums["top5"] = (p.topk(5, dim=1).indices == labels[:, None]).any(1).sum().double()
    # Bins are (lo, hi], found by comparison: 0.07 * 100 already rounds into the next bin. The
    # clamp keeps NaN, and values that rounding lifts above 1, in the last bin.
    borders = torch.arange(1, bins + 1, dtype=p.dtype, device=p.device) / bins
    bin_of = torch.bucketize(confidence, borders).clamp_max(bins - 1)
    level = (entropy / math.log(classes) * RETENTION_BINS).long().clamp(0, RETENTION_BINS - 1)

    def histogram(index: Tensor, weights: Tensor, size: int) -> Tensor:
        return hit.new_zeros(size).index_add_(0, index, weights)

    if by_class:
        cells = torch.bincount(labels * classes + top, minlength=classes**2)
        sums["confusion"] = cells.reshape(classes, classes).int()
        least, together = RANKS
        intervals = max(least, min(ranking.FINEST, together // classes))
        one_hot = torch.nn.functional.one_hot(labels, classes)
        sums["ranks"] = ranking.histograms(p, one_hot, intervals)
    ones = torch.ones_like(hit)
    return sums | {
        "bin_count": histogram(bin_of, ones, bins),
        "bin_confidence": histogram(bin_of, confidence, bins),
        "bin_hits": histogram(bin_of, hit, bins),
        "level_count": histogram(level, ones, RETENTION_BINS),
        "level_hits": histogram(level, hit, RETENTION_BINS),
    }


def uncertainties(draws: Tensor, p: Tensor) -> dict[str, Tensor]:
    """Return how uncertain class predictions are, each ``[B]``; see `classification_sums`.

    `draws` ``[S, B, C]``, predictions `p` ``[B, C]``, both float64. The entropy is in nats.
    """
    import torch

    drawn = draws.mean(0)
    aleatoric = (1 - torch.linalg.vecdot(draws, draws)).mean(0)
    return {
        "entropy": entropies(p),
        "aleatoric": aleatoric,
        "epistemic": 1 - drawn.square().sum(1) - aleatoric,
        "mutual_information": entropies(drawn) - entropies(draws).mean(0),
    }


def regression_sums(
    mean: Tensor, variance: Tensor, targets: Tensor, log_density: Tensor | None = None
) -> dict[str, Tensor]:
    """Sum the metrics of predictions with this mean and variance, each ``[B, T]``.

    `log_density` ``[B, T]`` of the `targets` replaces that of the Gaussian N(mean, variance).
    """
    mean, variance, y = mean.double(), variance.double(), targets.double()
    error = (y - mean).square()
    deviation = (error / variance).sqrt()
    nll = 0.5 * (error / variance + (2 * math.pi * variance).log())
    if log_density is not None:
        nll = -log_density.double()
    sums = {
        "examples": y.new_tensor(len(y)),
        "values": y.new_tensor(y.numel()),
        "squared_error": error.sum(),
        "target": y.sum(0),
        "target_squared": y.square().sum(0),
        "nll": nll.sum(),
    }
    for level in INTERVALS:
        reach = NormalDist().inv_cdf(0.5 + level / 200)
        sums[f"inside{level}"] = (deviation <= reach).double().sum()
    return sums


def add(left: Sums, right: Sums) -> dict[str, Tensor]:
    """Add two sums of the same kind; tensors ``[...]`` of a name have equal shapes."""
    return {name: left[name] + right[name] for name in left}


def per_sample(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum further figures of samples ``[B]``; `metrics_of` gives their means by these names."""
    return {f"{PER_SAMPLE}{name}": values.double().sum() for name, values in figures.items()}


def metrics_of(sums: Sums) -> dict[str, float]:
    """Compute the metrics from their sums; undefined metrics are left out.

    Classification: accuracy, top5, nll, brier, entropy, aleatoric, epistemic, mutual_information,
    ece, mce, aurc; balanced_accuracy and f1 (means over the classes that occur, f1 also over those
    predicted); auroc (mean over the classes that some, not all, samples have). Regression: rmse,
    nmse = sum (y - prediction)^2 / sum (y - mean y)^2 (undefined if all targets are equal), nll per
    value, coverage. Out of distribution (`bflcore.problem.ood`): auroc, fpr95. Of `per_sample`:
    means, unless they are infinite. Without samples no metric is defined.
    """
    n = float(sums["examples"])
    if not n:
        return {}
    if "strangeness" in sums:
        counts = sums["strangeness"]
        return {"auroc": float(ranking.auroc(counts)), "fpr95": float(ranking.fpr95(counts))}
    found = _regression(sums, n) if "squared_error" in sums else _classification(sums, n)
    means = {k: float(total) / n for k, total in sums.items() if k.startswith(PER_SAMPLE)}
    finite = {k.removeprefix(PER_SAMPLE): mean for k, mean in means.items() if math.isfinite(mean)}
    return found | finite


def _classification(sums: Sums, n: float) -> dict[str, float]:
    gap = (sums["bin_hits"] - sums["bin_confidence"]).abs()
    result = {name: float(sums[name]) / n for name in MEANS if name in sums}
    result["ece"] = float(gap.sum()) / n
    result["mce"] = float((gap / sums["bin_count"].clamp_min(1)).max())
    result["aurc"] = selective_risk(retention_curve(sums))[0]
    if "confusion" in sums:
        _, recall, _, f1 = _by_class(sums["confusion"])
        areas = ranking.auroc(sums["ranks"])
        found = {"auroc": areas, "balanced_accuracy": recall, "f1": f1}
        means = {name: float(values.nanmean()) for name, values in found.items()}
        result |= {name: mean for name, mean in means.items() if not math.isnan(mean)}
    return result


def _by_class(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each class's samples, recall, precision and F1 ``[C]``; NaN where undefined."""
    table = confusion.double()
    samples, predicted, hits = table.sum(1), table.sum(0), table.diagonal()
    return samples, hits / samples, hits / predicted, 2 * hits / (samples + predicted)


def class_metrics(sums: Sums) -> list[dict[str, float]]:
    """Return for each class its samples (examples), recall, precision and F1, where defined."""
    names = ("examples", "recall", "precision", "f1")
    columns = [values.tolist() for values in _by_class(sums["confusion"])]
    rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    return [{name: v for name, v in row.items() if not math.isnan(v)} for row in rows]


def _regression(sums: Sums, n: float) -> dict[str, float]:
    values = float(sums["values"])
    result = {"rmse": math.sqrt(float(sums["squared_error"]) / values)}
    spread = float((sums["target_squared"] - sums["target"].square() / n).sum())
    if spread > SPREAD * float(sums["target_squared"].sum()):
        result["nmse"] = float(sums["squared_error"]) / spread
    result["nll"] = float(sums["nll"]) / values
    for level in INTERVALS:
        result[f"coverage{level}"] = float(sums[f"inside{level}"]) / values
    return result


def summarise(
    per_client: Sequence[Sums], each: Sequence[Mapping[str, float]] = ()
) -> dict[str, dict[str, float]]:
    """Return each metric's mean and standard deviation over clients, and its pooled value.

    The mean is over the clients for which the metric is defined; without any, it is left out.
    `each` are the clients' metrics, where they are known already.
    """
    if not per_client:
        return {}
    each = each or [metrics_of(sums) for sums in per_client]
    summary = {}
    for name, pooled in metrics_of(reduce(add, per_client)).items():
        values = [metrics[name] for metrics in each if name in metrics]
        if values:
            mean, std = float(np.mean(values)), float(np.std(values))
            summary[name] = {"mean": mean, "std": std, "pooled": pooled}
    return summary


def reliability_diagram(sums: Sums) -> dict[str, list[float]]:
    """Return the count, mean confidence and accuracy of each bin of confidence."""
    count = sums["bin_count"]
    safe = count.clamp_min(1)
    return {
        "count": count.tolist(),
        "confidence": (sums["bin_confidence"] / safe).tolist(),
        "accuracy": (sums["bin_hits"] / safe).tolist(),
    }


def retention_curve(sums: Sums) -> dict[str, list[float]]:
    """Return the accuracy on the most certain samples by the fraction of samples retained.

    One point per occupied bin of entropy: a bin is retained or discarded as a whole.
    """
    count, hits = sums["level_count"].cumsum(0), sums["level_hits"].cumsum(0)
    steps = (sums["level_count"] > 0).nonzero()[:, 0]
    return {
        "retained": (count[steps] / count[-1]).tolist(),
        "accuracy": (hits[steps] / count[steps]).tolist(),
    }


def selective_risk(curve: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the area under the curve of error over coverage (AURC), and its excess.

    `curve` is a retention curve: the accuracies of the fractions `retained`, which are the most
    certain samples. Samples between two fractions are equally certain: errors are spread evenly
    among them. The excess is over a ranking that puts all errors last, as good as possible.
    Reference: Geifman & El-Yaniv 2017; excess: Geifman, Uziel & El-Yaniv 2019, eq. 5.
    """
    area = before = errors = 0.0
    for kept, accuracy in zip(curve["retained"], curve["accuracy"], strict=True):
        width, found = kept - before, kept * (1 - accuracy)
        area += found - errors
        # The error at coverage c is (errors + rate (c - before)) / c, where the rate of errors is
        # (found - errors) / width. An untrue client's share may be too small to have a width.
        if before and width > 0:
            area += (errors - (found - errors) / width * before) * math.log(kept / before)
        before, errors = kept, found
    best = errors + (1 - errors) * math.log1p(-errors) if errors < 1 else 1.0
    return area, area - best


def entropies(p: Tensor) -> Tensor:
    """Return the entropies ``[...]`` in nats of class probabilities `p` ``[..., C]``."""
    return -(p * p.clamp_min(CLIP).log()).sum(-1)
