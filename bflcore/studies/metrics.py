"""Metrics by name: what a table shows, and what a choice may be made by."""

from __future__ import annotations

from collections.abc import Iterable

from bflcore.errors import OptionError, unknown
from bflcore.problem.directions import HIGHER, LOWER, direction

__all__ = ["SHOWN", "check_metric", "chosen_on", "shown"]

MODELS = ("personal", "global", "novel")
VALIDATION = "validation."

# What a table shows unless it is asked for something else.
SHOWN = (
    "personal.accuracy",
    "personal.rmse",
    "personal.nll",
    "personal.ece",
    "personal.coverage90",
    "validation.accuracy",
    "validation.rmse",
    "validation.nll",
)


def shown(known: Iterable[str]) -> tuple[str, ...]:
    """Return the metrics that a table shows by default, of those that there are."""
    there = set(known)
    return tuple(name for name in SHOWN if name in there) or tuple(sorted(there))[:4]


def check_metric(metric: str, known: Iterable[str], flag: str = "--metric") -> str:
    """Return a metric's name. Raises `OptionError` if no run has it."""
    names = set(known)
    if metric not in names:
        raise unknown(f"metric of {flag}", metric, names)
    return metric


def chosen_on(metric: str, on: str) -> str:
    """Return the metric to choose by: that on validation samples, or on test data.

    ``personal.nll`` on validation samples is ``validation.nll``, ``novel.nll`` is
    ``validation.novel.nll``. Raises `OptionError` for a metric of which no value is better than
    another, or that does not exist on those samples.
    """
    if on not in {"validation", "test"}:
        raise unknown("samples of --on:", on, ("validation", "test"))
    if not direction(metric):
        names = ", ".join(sorted(HIGHER | LOWER))
        raise OptionError(
            f"--select: {metric} does not say which value is better; allowed: personal., global. "
            f"or novel. with {names}"
        )
    of_validation = metric.startswith(VALIDATION)
    if on == "test":
        if of_validation:
            raise OptionError(f"--select: {metric} is not on test data; leave out --on test")
        return metric
    if of_validation:
        return metric
    model, _, name = metric.rpartition(".")
    if model not in MODELS:
        raise OptionError(
            f"--select: {metric} is measured on test data alone; choose by personal.{name}, or add "
            "--on test, which says so"
        )
    return VALIDATION + (name if model == "personal" else metric)
