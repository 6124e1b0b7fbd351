"""What sums of metrics can be: a client's evaluation is checked before it is added to others.

Numbers that are not finite pass where those of a model that diverged are not. A negative error,
more hits than samples, or a histogram of other samples cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bflcore.problem.metrics import CLIP, PER_SAMPLE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["impossible"]

MOST = 1e15  # samples
SLACK = 1e-6  # rounding, per sample
# The range of a metric of one sample. Mutual information is at most log C nats.
RANGES = {
    "accuracy": (0.0, 1.0),
    "top5": (0.0, 1.0),
    "nll": (0.0, -math.log(CLIP)),
    "brier": (0.0, 2.0),
    "entropy": (0.0, 1.0),
    "aleatoric": (0.0, 1.0),
    "epistemic": (0.0, 1.0),
    "mutual_information": (0.0, 50.0),
}
FINITE = ("accuracy", "top5")  # also of a model that diverged
COUNTS = ("bin_count", "level_count", "confusion", "ranks", "strangeness")  # histograms
HITS = {"bin_hits": "bin_count", "bin_confidence": "bin_count", "level_hits": "level_count"}


def impossible(sums: Mapping[str, Tensor]) -> str:
    """Return which of the sums ``[...]`` of a client's metrics cannot be, and why; "" if none."""
    n = float(sums["examples"])
    if not (1 <= n <= MOST and n == math.floor(n)):
        return f"examples is {n:g}, not a number of samples"
    regression = "squared_error" in sums
    found = (_reason(name, sums, n, regression) for name in sums)
    return next(filter(None, found), _regression(sums) if regression else "")


def _reason(name: str, sums: Mapping[str, Tensor], n: float, regression: bool) -> str:
    """Return why one sum over n samples cannot be; "" if it can."""
    tensor = sums[name]
    if name in COUNTS:
        return _histogram(name, tensor.double(), n)
    if name in HITS:
        most = sums[HITS[name]].double()
        wrong = bool(((tensor < -SLACK) | (tensor > most + SLACK * (1 + most))).any())
        return f"{name} is not between 0 and {HITS[name]}" if wrong else ""
    if name.startswith(PER_SAMPLE):
        return f"{name} is negative" if float(tensor) < 0 else ""
    if name not in RANGES or regression:
        return ""
    (low, high), total = RANGES[name], float(tensor)
    lost = name in FINITE and not math.isfinite(total)
    outside = total < n * (low - SLACK) or total > n * (high + SLACK)
    return f"{name} is {total:g} for {n:g} samples" if lost or outside else ""


def _histogram(name: str, counts: Tensor, n: float) -> str:
    """Return why counts are not those of n samples."""
    if not bool(counts.isfinite().all()) or bool((counts < 0).any()):
        return f"{name} has a count that is negative or not a number"
    if name == "ranks":  # [C, 2, R]: all samples, for each class
        total = counts.sum((1, 2))
    else:  # [2, R]: own samples and foreign ones
        total = counts[0].sum() if name == "strangeness" else counts.sum()
    return "" if bool((total == n).all()) else f"{name} does not count {n:g} samples"


def _regression(sums: Mapping[str, Tensor]) -> str:
    values = float(sums["values"])
    if not (1 <= values <= MOST):
        return f"values is {values:g}, not a number of targets"
    for name in ("squared_error", "target_squared"):
        if bool((sums[name] < 0).any()):
            return f"{name} is negative"
    for name, tensor in sums.items():
        if name.startswith("inside") and not 0 <= float(tensor) <= values:
            return f"{name} is not between 0 and {values:g}"
    return ""
