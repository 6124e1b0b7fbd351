"""Choosing the best cell, and saying how sure that is."""

from __future__ import annotations

import math
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.problem.directions import direction
from bflcore.report.statistics import Difference, mean, paired
from bflcore.studies.metrics import check_metric, chosen_on
from bflcore.studies.trials import Groups, values_of

__all__ = ["Choice", "choose"]


@attrs.frozen
class Choice:
    """The best cell by the mean of a metric over `seeds`, and how the second differs from it.

    `left_out` are cells that were not compared, as some of their runs failed or diverged. `on` is
    what the metric was measured on: validation samples or, which is no way to choose, test data.
    """

    best: str
    metric: str
    on: str
    value: float
    seeds: tuple[int, ...]
    second: str = ""
    difference: Difference | None = None
    left_out: tuple[str, ...] = ()

    @property
    def distinguishable(self) -> bool:
        """Whether the interval of the difference to the second excludes 0."""
        found = self.difference
        return bool(found and found.low is not None and found.low * (found.high or 0) > 0)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**attrs.asdict(self), "distinguishable": self.distinguishable}

    def __str__(self) -> str:
        n = len(self.seeds)
        over = "1 seed" if n == 1 else f"{n} seeds"
        parts = [f"best {self.metric}: {self.best}, {self.value:.4f} (mean over {over})"]
        if self.difference is not None:
            parts.append(f"second: {self.second}, {self._compared(self.difference)}")
        if self.left_out:
            parts.append(
                f"not compared, as runs are missing or not finite: {', '.join(self.left_out)}"
            )
        if self.on == "test":
            parts.append("chosen on test data: these figures are optimistic, not a result")
        return "; ".join(parts)

    def _compared(self, found: Difference) -> str:
        said = f"{found.mean:+.4f}"
        if found.low is None or found.high is None:
            return f"{said} (from a single seed it cannot be said whether they differ)"
        interval = f"{said} [{found.low:+.4f}, {found.high:+.4f}], paired over seeds, 95 %"
        return f"{interval}: {'' if self.distinguishable else 'not '}distinguishable"


def choose(groups: Groups, metric: str, on: str = "validation") -> Choice:
    """Choose the best cell by the mean of a metric over seeds.

    Only cells with all the seeds that any cell has are compared. Raises `OptionError` for a metric
    that nothing can be chosen by, and `RunError` if no cell has it.
    """
    name = chosen_on(metric, on)
    known = {key for trials in groups.values() for trial in trials for key in trial.metrics}
    if on == "validation" and not any(key.startswith("validation.") for key in known):
        raise RunError(
            "--select: no run has validation samples; run again with --validation-fraction 0.2"
        )
    check_metric(name, known, "--select")
    values = {cell: values_of(trials, name) for cell, trials in groups.items()}
    seeds = tuple(sorted({seed for found in values.values() for seed in found}))
    whole = {
        cell: found
        for cell, found in values.items()
        if len(found) == len(seeds) and all(map(math.isfinite, found.values()))
    }
    if not whole:
        raise RunError(
            f"--select: no cell has a finite {name} of all seeds; run the same command again"
        )
    means = {cell: mean(list(found.values())) for cell, found in whole.items()}
    sign = direction(name)
    best, *others = sorted(means, key=lambda cell: -sign * means[cell])
    left_out = tuple(cell for cell in values if cell not in whole)
    if not others:
        return Choice(best, name, on, means[best], seeds, left_out=left_out)
    pairs = [whole[others[0]][seed] - whole[best][seed] for seed in seeds]
    return Choice(best, name, on, means[best], seeds, others[0], paired(pairs), left_out)
