"""Results of a study: the final metrics of every run, with commands, versions and machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.integrity import read_json, write_json
from bflcore.studies.cells import Cell

__all__ = ["FILE", "Results", "Trial", "collect", "run_folder"]

FILE = "results.json"
APART = ("run", "digest", "fingerprints", "warnings", "forced")  # of one run alone


@attrs.frozen
class Trial:
    """One run of a cell: its seed, final metrics, bytes and seconds, or why it failed.

    `metrics` maps ``personal.accuracy`` and others to their ``mean`` and ``std`` over clients and
    their value ``pooled`` over samples.
    """

    cell: str
    seed: int
    command: str
    metrics: Mapping[str, Mapping[str, float]] = attrs.field(factory=dict)
    bytes: Mapping[str, int] = attrs.field(factory=dict)
    failure: str = ""
    seconds: float | None = attrs.field(default=None, eq=False)


@attrs.frozen
class Results:
    """What the runs of a study found.

    `versions` has an entry for each environment that runs were made in (one, unless the study was
    continued in another).
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
    def failures(self) -> tuple[Trial, ...]:
        """The runs that failed."""
        return tuple(one for one in self.trials if one.failure)

    def values(self, cell: str, metric: str, statistic: str = "mean") -> dict[int, float]:
        """Return a metric of a cell's finished runs by seed; runs without it are left out."""
        found = {one.seed: one.metrics.get(metric) for one in self.of(cell)}
        return {
            seed: values[statistic]
            for seed, values in found.items()
            if values is not None and values.get(statistic) is not None
        }

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
            trials = [
                Trial(**run, seconds=found["seconds"].get(run_folder(run["cell"], run["seed"])))
                for run in found["runs"]
            ]
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


def run_folder(cell: str, seed: int) -> str:
    """Return the folder of a run within that of its study."""
    return f"{cell}/seed-{seed}"


def collect(
    cells: Sequence[Cell], seeds: Sequence[int], folder: Path, failures: Mapping[str, str]
) -> Results:
    """Read the summaries of all runs; `failures` maps runs' folders to reasons."""
    trials, versions = [], list[dict[str, Any]]()
    for cell in cells:
        for seed in seeds:
            name = run_folder(cell.name, seed)
            trial = _trial(cell, seed, folder / name, failures.get(name, ""))
            trials.append(trial)
            if not trial.failure and (found := _versions(folder / name)) not in versions:
                versions.append(found)
    return Results(tuple(cells), tuple(seeds), tuple(trials), tuple(versions), machine(), folder)


def machine() -> dict[str, Any]:
    """Return what this machine is: the processor's kind and its cores."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(named, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _trial(cell: Cell, seed: int, path: Path, failure: str) -> Trial:
    command = cell.command(seed)
    if failure:
        return Trial(cell.name, seed, command, failure=failure)
    try:
        summary = read_json(path / "summary.json")
        final = summary["final"]
        metrics = {
            name: dict(value)
            for name, value in final.items()
            if isinstance(value, dict) and "mean" in value
        }
        total = float(summary["seconds"]["total"])
        return Trial(cell.name, seed, command, metrics, summary["bytes"], seconds=total)
    except FileNotFoundError:
        return Trial(cell.name, seed, command, failure="it has not been run")
    except RunError as error:
        return Trial(cell.name, seed, command, failure=str(error))


def _versions(path: Path) -> dict[str, Any]:
    found = read_json(path / "environment.json")
    return {name: value for name, value in found.items() if name not in APART}


def _plain(trial: Trial) -> dict[str, Any]:
    return {
        name: value
        for name, value in attrs.asdict(trial).items()
        if name != "seconds" and (value or name == "seed")
    }
