"""A table's outcome: the paper's numbers beside ours, differences, and the claims checked."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from bflcore.report.statistics import deviation, mean, paired
from bflcore.studies.evidence import Measured
from bflcore.studies.paper_tables import Claim, Table
from bflcore.studies.plan import Planned

__all__ = ["Checked", "Compared", "Reproduction", "check", "compared"]

NOT_DISTINGUISHABLE = "not distinguishable"


@attrs.frozen
class Compared:
    """A cell with the paper's number, the other paper's, and ours by seed, in the paper's unit."""

    planned: Planned
    paper: float | None
    other: float | None
    ours: Mapping[int, float]
    missing: tuple[int, ...] = ()  # seeds that are not finished

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None without any."""
        return mean([*self.ours.values()]) if self.ours else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return deviation([*self.ours.values()])

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None without one of them, or on data of another kind."""
        if self.mean is None or self.paper is None or not self.planned.comparable:
            return None
        return self.mean - self.paper

    @property
    def nearer(self) -> float | None:
        """The number of the two papers that is nearer to ours; None if none can be compared."""
        printed = [number for number in (self.paper, self.other) if number is not None]
        ours = self.mean
        if ours is None or not printed or not self.planned.comparable:
            return None
        return min(printed, key=lambda number: abs(number - ours))

    @property
    def short(self) -> float:
        """How much ours is worse than the nearer paper's, in the metric's unit; at least 0."""
        if self.mean is None or self.nearer is None:
            return 0.0
        sign = {"higher": 1, "lower": -1, "neither": 0}[self.planned.column.metric.better]
        return max(0.0, sign * (self.nearer - self.mean))

    @property
    def is_exception(self) -> bool:
        """Whether ours is worse than the nearer paper's by more than the metric's margin."""
        return self.short > self.planned.column.metric.margin


@attrs.frozen
class Checked:
    """A claim with the mean difference over seeds, and half the width of its interval."""

    claim: Claim
    difference: float | None = None
    half_width: float | None = None
    seeds: int = 0
    verdict: str = "not run"


@attrs.frozen
class Reproduction:
    """A table as far as it was run: every cell beside the paper's, and the claims.

    `failures` maps commands of runs that failed to the reasons; `command` is what wrote it, `base`
    the part of it that selects neither rows, columns nor seeds; `kept` counts the runs of other
    settings in its record.
    """

    table: Table
    cells: tuple[Compared, ...]
    claims: tuple[Checked, ...]
    runs: tuple[Measured, ...]
    failures: Mapping[str, str]
    command: str
    base: str
    kept: int = 0

    @property
    def exceptions(self) -> list[Compared]:
        """The cells that are worse than the nearer paper's by more than the margin, worst first."""
        found = [one for one in self.cells if one.is_exception]
        return sorted(found, key=lambda one: -one.short / one.planned.column.metric.margin)


def compared(
    planned: Planned, values: Mapping[int, float], seeds: tuple[int, ...], other: float | None
) -> Compared:
    """Compare a cell's values by seed, as ``summary.json`` has them, with the papers' numbers."""
    scale = planned.column.metric.scale
    return Compared(
        planned,
        planned.row.paper.get(planned.column.name),
        other,
        {seed: scale * value for seed, value in values.items()},
        tuple(seed for seed in seeds if seed not in values),
    )


def check(claim: Claim, table: Table, cells: Mapping[tuple[str, str], Compared]) -> Checked:
    """Check a claim on the seeds that all of its cells have; at least two are needed.

    The difference is paired by seed, and positive if it is as claimed (for `alike`: in size). Its
    95 % interval is Student's, with the seed as the unit.
    """
    than_rows = claim.than_rows or claim.rows
    first = [cells.get((row, claim.column)) for row in claim.rows]
    second = [cells.get((row, claim.than_column)) for row in than_rows]
    found = [one for one in (*first, *second) if one is not None]
    if len(found) < len(first) + len(second):
        return Checked(claim)
    seeds = sorted(set.intersection(*(set(one.ours) for one in found)))
    if len(seeds) < 2:
        return Checked(claim, seeds=len(seeds), verdict="needs two seeds")
    left, right = found[: len(first)], found[len(first) :]
    sign = -1 if table.column(claim.column).metric.better == "lower" else 1
    gap = paired(
        [
            sign * (mean([one.ours[seed] for one in left]) - mean([o.ours[seed] for o in right]))
            for seed in seeds
        ]
    )
    if gap.high is None:
        return Checked(claim, seeds=len(seeds), verdict="a value is not finite")
    half = gap.high - gap.mean
    return Checked(claim, gap.mean, half, len(seeds), _verdict(claim, gap.mean, half))


def _verdict(claim: Claim, center: float, half: float) -> str:
    if claim.alike:
        if abs(center) + half <= claim.within:
            return "seen"
        return "not seen" if abs(center) - half > claim.within else "undecided"
    if abs(center) <= half:
        return NOT_DISTINGUISHABLE
    return "seen" if center > 0 else "not seen: the opposite"
