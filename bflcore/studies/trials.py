"""Trials: single runs of a study, with what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.integrity import read_json
from bflcore.report.reading import DATA, by_client

__all__ = ["Groups", "Trial", "final_metrics", "of_clients", "values_of"]


@attrs.frozen
class Trial:
    """One run of a cell: its seed, final metrics, bytes and seconds, or why it failed.

    `metrics` maps ``personal.accuracy`` and others to their ``mean`` and ``std`` over clients and
    their value ``pooled`` over samples. `path` is the run's folder, which may be gone.
    """

    cell: str
    seed: int
    command: str = ""
    metrics: Mapping[str, Mapping[str, float]] = attrs.field(factory=dict)
    bytes: Mapping[str, int] = attrs.field(factory=dict)
    failure: str = ""
    seconds: float | None = attrs.field(default=None, eq=False)
    path: Path | None = attrs.field(default=None, eq=False)


Groups = Mapping[str, Sequence[Trial]]  # what is compared: the runs of each cell


def final_metrics(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the final metrics in the content of a run's ``summary.json``."""
    final = summary["final"].items()
    return {
        name: dict(value) for name, value in final if isinstance(value, dict) and "mean" in value
    }


def values_of(trials: Sequence[Trial], metric: str, statistic: str = "mean") -> dict[int, float]:
    """Return a metric of finished runs by seed; runs without it are left out."""
    found = {one.seed: one.metrics.get(metric, {}).get(statistic) for one in trials}
    return {seed: value for seed, value in found.items() if value is not None}


def of_clients(trial: Trial, metric: str) -> tuple[str, dict[int, float]]:
    """Return a metric of each client of a run, and the digest of the run's data and partition.

    Raises `RunError` if the run's folder is gone or damaged.
    """
    if trial.path is None or not trial.path.is_dir():
        raise RunError(
            f"{trial.path or trial.cell} is not here: clients are compared in the runs' own "
            "folders; use --over seeds"
        )
    try:
        marks = read_json(trial.path / "environment.json")["fingerprints"]
        return marks[DATA], by_client(read_json(trial.path / "evaluation.json"), metric)
    except (FileNotFoundError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{trial.path} does not have the files that a run writes ({error}); run it again"
        ) from None
