"""Comparing cells with one of them: paired differences over seeds, or over clients within seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from bflcore.errors import OptionError, RunError, unknown
from bflcore.problem.directions import direction
from bflcore.report.statistics import Difference, deviation, holm, mean, paired, stratified
from bflcore.studies.metrics import check_metric, shown
from bflcore.studies.trials import Groups, Trial, of_clients, values_of
from bflcore.studies.versions import differing

__all__ = ["Comparison", "Row", "compare"]

SIGNIFICANT = 0.05
SAME = "not distinguishable"
OVER = ("seeds", "clients")


@attrs.frozen
class Row:
    """A metric of a cell: mean and deviation over n seeds, and the difference to another cell.

    `p` is adjusted by Holm's method for all cells that are compared by this metric.
    """

    metric: str
    cell: str
    n: int
    mean: float
    deviation: float | None
    difference: Difference | None = None
    p: float | None = None
    baseline: bool = False

    @property
    def verdict(self) -> str:
        """Say whether the cell is better or worse, as far as that can be told."""
        if self.baseline:
            return "baseline"
        if self.difference is None:
            return "no pairs"
        if self.p is None:
            if not math.isfinite(self.difference.mean):
                return "not finite"
            return (
                f"{'one pair' if self.difference.n == 1 else 'a single pair in a seed'}: not known"
            )
        if self.p >= SIGNIFICANT:
            return SAME
        sign = direction(self.metric) * self.difference.mean
        return "differs" if not sign else ("better" if sign > 0 else "worse")


@attrs.frozen
class Comparison:
    """Rows by metric and cell, and what they were compared with, over what."""

    against: str
    over: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    versions: str = ""  # a sentence, if those of the runs differ

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with what they mean."""
        rows = [{**attrs.asdict(row), "verdict": row.verdict} for row in self.rows]
        return {
            "against": self.against,
            "over": self.over,
            "rows": rows,
            "left_out": list(self.left_out),
            "meaning": self.meaning,
        }

    @property
    def meaning(self) -> str:
        """Say what the columns are."""
        tested = Counter(row.metric for row in self.rows if row.p is not None).values()
        unit = {
            "seeds": "the unit of replication is the seed, which decides partition, initial values "
            "and training",
            "clients": "the unit of replication is the client, within seeds: what is said holds "
            "for the clients of these very runs, not for another training; no pairs: other data or "
            "another partition",
        }[self.over]
        text = (
            "Mean and deviation are over seeds. Differences are paired, with 95 % confidence "
            f"intervals (Student's t), against {self.against}; {unit}."
        )
        if max(tested, default=0) > 1:
            number = " or ".join(map(str, sorted(set(tested))))
            text += (
                f" p is adjusted for {number} comparisons per metric (Holm), the intervals are "
                f"not; {SAME}: p is at least {SIGNIFICANT:g}."
            )
        elif tested:
            text += f" {SAME[0].upper()}{SAME[1:]}: the interval contains 0."
        return f"{text} {self.versions}".rstrip()


def compare(
    groups: Groups,
    against: str = "",
    metrics: Sequence[str] = (),
    over: str = "",
    statistic: str = "mean",
    versions: Sequence[Mapping[str, Any]] = (),
) -> Comparison:
    """Compare cells with `against` (default: the first) by paired differences.

    `over` seeds, or over clients within seeds where both cells have the same data and partition;
    by default over seeds where there are two. `versions` are all that the runs were made with.
    Raises `BflError` for an unknown name.
    """
    finished = {
        cell: done
        for cell, trials in groups.items()
        if (done := [trial for trial in trials if not trial.failure])
    }
    if not finished:
        raise RunError("no run is finished; nothing can be compared")
    against = against or next(iter(finished))
    if against not in finished:
        raise unknown("cell of --against", against, finished)
    if over and over not in OVER:
        raise unknown("unit of --over", over, OVER)
    if over == "clients" and statistic != "mean":
        raise OptionError("--over clients: pooled metrics have no clients; leave out --pooled")
    known = {name for done in finished.values() for trial in done for name in trial.metrics}
    names = tuple(check_metric(name, known) for name in metrics) or shown(known)
    if not over:
        seeds = [{trial.seed for trial in done} for done in finished.values()]
        alone = len(set[int]().union(*seeds)) == 1 and statistic == "mean"
        over = "clients" if alone else "seeds"
    rows = [
        row for name in names for row in _rows(finished, against, name, over, statistic)
    ]  # fmt: skip
    left_out = tuple(cell for cell in groups if cell not in finished)
    return Comparison(against, over, tuple(rows), left_out, differing(versions))


def _rows(groups: Groups, against: str, metric: str, over: str, statistic: str) -> list[Row]:
    """Return a metric's rows, their p-values adjusted for all comparisons."""
    rows, base = list[Row](), groups[against]
    for cell, trials in groups.items():
        values = list(values_of(trials, metric, statistic).values())
        if not values:
            continue
        found = None
        if cell != against and over == "seeds":
            found = _over_seeds(trials, base, metric, statistic)
        elif cell != against:
            found = _over_clients(trials, base, metric)
        numbers = len(values), mean(values), deviation(values)
        rows.append(Row(metric, cell, *numbers, found, baseline=cell == against))
    tested = [i for i, row in enumerate(rows) if row.difference and row.difference.p is not None]
    adjusted = holm([rows[i].difference.p for i in tested])  # type: ignore[union-attr,misc]
    for i, p in zip(tested, adjusted, strict=True):
        rows[i] = attrs.evolve(rows[i], p=p)
    return rows


def _over_seeds(
    trials: Sequence[Trial], base: Sequence[Trial], metric: str, statistic: str
) -> Difference | None:
    ours, theirs = (values_of(runs, metric, statistic) for runs in (trials, base))
    pairs = [value - theirs[seed] for seed, value in ours.items() if seed in theirs]
    return paired(pairs) if pairs else None


def _over_clients(trials: Sequence[Trial], base: Sequence[Trial], metric: str) -> Difference | None:
    """Compare clients by the differences of their metric; each seed is a stratum."""
    others, strata = {trial.seed: trial for trial in base}, list[list[float]]()
    for trial in trials:
        if trial.seed not in others:
            continue
        mark, ours = of_clients(trial, metric)
        other, theirs = of_clients(others[trial.seed], metric)
        if mark == other:
            strata.append([ours[client] - theirs[client] for client in ours if client in theirs])
    return stratified(strata) if any(strata) else None
