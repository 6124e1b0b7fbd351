"""Results of a study: the final metrics of every run, with commands, versions and machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError, unknown
from bflcore.experiments.environment import machine
from bflcore.experiments.integrity import read_json, write_json
from bflcore.report.reading import CELL
from bflcore.studies.cells import Cell
from bflcore.studies.comparison import Comparison, compare
from bflcore.studies.selection import Choice, choose
from bflcore.studies.trials import Trial, final_metrics, values_of

__all__ = [
    "FILE",
    "SETTINGS",
    "STUDY",
    "VERSIONS",
    "Results",
    "Trial",
    "collect",
    "read_environment",
    "read_study",
    "run_folder",
    "write_study",
]

FILE = "results.json"
SETTINGS = CELL  # in a cell's folder: what its runs were asked to be
STUDY = "study.json"  # cells and seeds of a study that has begun
VERSIONS = ("python", "platform", "torch", "distributions")  # of a run's environment.json


@attrs.frozen
class Results:
    """What the runs of a study found.

    `versions` has an entry for each environment that runs were made in (one, unless the study was
    continued in another). `machine` is that of the first finished run.
    """

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    trials: tuple[Trial, ...]
    versions: tuple[Mapping[str, Any], ...] = ()
    machine: Mapping[str, Any] = attrs.field(factory=dict)
    folder: Path | None = attrs.field(default=None, eq=False)

    def of(self, cell: str) -> tuple[Trial, ...]:
        """Return the runs of a cell that are finished, by seed."""
        return tuple(one for one in self.trials if one.cell == cell and not one.failure)

    @property
    def groups(self) -> dict[str, tuple[Trial, ...]]:
        """The finished runs of each cell."""
        return {cell.name: self.of(cell.name) for cell in self.cells}

    @property
    def failures(self) -> tuple[Trial, ...]:
        """The runs that failed."""
        return tuple(one for one in self.trials if one.failure)

    def values(self, cell: str, metric: str, statistic: str = "mean") -> dict[int, float]:
        """Return a metric of a cell's finished runs by seed; runs without it are left out."""
        return values_of(self.of(cell), metric, statistic)

    def best(self, metric: str, on: str = "validation") -> Choice:
        """Choose the best cell by a metric on validation samples; see `selection.choose`."""
        return choose(self.groups, metric, on)

    def compare(
        self,
        against: str = "",
        metrics: Sequence[str] = (),
        over: str = "",
        statistic: str = "mean",
    ) -> Comparison:
        """Compare the cells with one of them; see `comparison.compare`."""
        return compare(self.groups, against, metrics, over, statistic, self.versions)

    def frame(self, statistic: str = "mean") -> Any:
        """Return a pandas data frame with a row per run and a column per metric.

        Where a metric lacks the statistic, its value is NaN. Raises `RunError` without pandas,
        `OptionError` for a statistic that no metric has.
        """
        known = {key for one in self.trials for values in one.metrics.values() for key in values}
        if known and statistic not in known:
            raise unknown("statistic", statistic, known)
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise RunError("frame needs pandas: pip install pandas") from None
        cells = {cell.name: cell for cell in self.cells}
        rows = [
            {
                "cell": one.cell,
                "method": cells[one.cell].method,
                **cells[one.cell].point,
                "seed": one.seed,
                "seconds": one.seconds,
                **{name: values.get(statistic) for name, values in one.metrics.items()},
            }
            for one in self.trials
            if not one.failure
        ]
        return pd.DataFrame(rows)

    def write(self, path: Path | None = None) -> Path:
        """Write JSON to a file (default: ``results.json`` in the study's folder); return its path.

        Equal results give equal files, but for the seconds.
        """
        if path is None and self.folder is None:
            raise RunError("these results have no folder; give a path")
        path = path or (self.folder or Path()) / FILE
        write_json(path, self.as_json())
        return path

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "cells": [cell.as_json() for cell in self.cells],
            "seeds": list(self.seeds),
            "runs": [_plain(trial) for trial in self.trials],
            "versions": [dict(one) for one in self.versions],
            "machine": dict(self.machine),
            # Here, they leave the digest alone.
            "seconds": {
                run_folder(one.cell, one.seed): one.seconds
                for one in self.trials
                if one.seconds is not None
            },
        }

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return what `write` wrote to a file, or to a study's folder. Raises `RunError`."""
        file = path / FILE if path.is_dir() else path
        try:
            found = read_json(file, "restore it, or run the study again")
            trials = [_read(run, found["seconds"], file.parent) for run in found["runs"]]
            return cls(
                tuple(Cell(**cell) for cell in found["cells"]),
                tuple(found["seeds"]),
                tuple(trials),
                tuple(found["versions"]),
                found["machine"],
                file.parent,
            )
        except FileNotFoundError:
            raise RunError(
                f"{file} is missing: the study has not ended; run its command again"
            ) from None
        except (LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{file} does not have the form of a study's results "
                f"({type(error).__name__}: {error}); run the study again"
            ) from None


def write_study(cells: Sequence[Cell], seeds: Sequence[int], folder: Path) -> None:
    """Write which cells and seeds are executed in a folder."""
    content = {"cells": [cell.as_json() for cell in cells], "seeds": list(seeds)}
    write_json(folder / STUDY, content)


def read_study(folder: Path) -> tuple[tuple[Cell, ...], tuple[int, ...]]:
    """Return the cells and seeds of a study that has begun in a folder. Raises `RunError`."""
    try:
        found = read_json(folder / STUDY, "run the study's command again")
        return tuple(Cell(**cell) for cell in found["cells"]), tuple(found["seeds"])
    except FileNotFoundError:
        raise RunError(f"{folder} is not the folder of a sweep; give the one of --out") from None
    except (LookupError, TypeError) as error:
        raise RunError(
            f"{folder / STUDY} does not have the form of a study ({error}); run the study's "
            "command again"
        ) from None


def run_folder(cell: str, seed: int) -> str:
    """Return the folder of a run within that of its study."""
    return f"{cell}/seed-{seed}"


def collect(
    cells: Sequence[Cell], seeds: Sequence[int], folder: Path, failures: Mapping[str, str]
) -> Results:
    """Read the summaries of all runs; `failures` maps runs' folders to reasons."""
    trials, versions, machines = [], list[dict[str, Any]](), list[dict[str, Any]]()
    for cell in cells:
        for seed in seeds:
            name = run_folder(cell.name, seed)
            trial = _trial(cell, seed, folder / name, failures.get(name, ""))
            trials.append(trial)
            if not trial.failure:
                made_with, made_on = read_environment(folder / name)
                versions += [made_with] if made_with not in versions else []
                machines += [made_on] if made_on else []
    place = machines[0] if machines else machine()
    return Results(tuple(cells), tuple(seeds), tuple(trials), tuple(versions), place, folder)


def read_environment(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's versions, and its machine (empty for a run of an earlier version).

    Raises `RunError` if they cannot be read.
    """
    path = run / "environment.json"
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise RunError(f"{path} is missing; restore the file, or start the run again") from None
    return {name: found[name] for name in VERSIONS if name in found}, found.get("machine", {})


def _read(run: Mapping[str, Any], seconds: Mapping[str, float], folder: Path) -> Trial:
    name = run_folder(run["cell"], run["seed"])
    return Trial(**run, seconds=seconds.get(name), path=folder / name)


def _trial(cell: Cell, seed: int, path: Path, failure: str) -> Trial:
    command = cell.command(seed)
    if not failure:
        try:
            summary = read_json(path / "summary.json")
            metrics, total = final_metrics(summary), float(summary["seconds"]["total"])
            counted = summary["bytes"]
            read_environment(path)
        except FileNotFoundError:
            failure = "it has not been run"
        except RunError as error:
            failure = str(error)
    if failure:
        return Trial(cell.name, seed, command, failure=failure, path=path)
    return Trial(cell.name, seed, command, metrics, counted, seconds=total, path=path)


def _plain(trial: Trial) -> dict[str, Any]:
    return {
        name: value
        for name, value in attrs.asdict(trial).items()
        if name not in {"seconds", "path"} and (value or name == "seed")
    }
