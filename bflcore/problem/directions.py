"""Which way a metric gets better."""

from __future__ import annotations

__all__ = ["HIGHER", "LOWER", "direction"]

HIGHER = frozenset({"accuracy", "top5", "balanced_accuracy", "f1", "auroc"})
LOWER = frozenset({"nll", "brier", "ece", "mce", "aurc", "rmse", "nmse", "fpr95"})


def direction(metric: str) -> int:
    """Return 1 if higher values are better, -1 if lower ones are, and 0 if neither is.

    `metric` may begin with a group: ``personal.nll``.
    """
    name = metric.rpartition(".")[2]
    return (name in HIGHER) - (name in LOWER)
