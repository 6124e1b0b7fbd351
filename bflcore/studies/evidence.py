"""What was measured for a table: one record per run, with versions and machine, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.integrity import read_json, write_json
from bflcore.files import make_folder
from bflcore.studies.results import Results, Trial

__all__ = ["Evidence", "Measured", "write_record"]

# Metrics that a table may show; the others stay with the run.
KEPT = ("accuracy", "top5", "nll", "brier", "ece", "mce", "rmse", "nmse", "coverage")


@attrs.frozen
class Measured:
    """A finished run, and where it was made: versions of Python, torch and plugins; the machine."""

    trial: Trial
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]

    def value(self, key: str, statistic: str) -> float | None:
        """Return a metric of the last round, or None if the run has none."""
        return self.trial.metrics.get(key, {}).get(statistic)


@attrs.define
class Evidence:
    """The finished runs that are known, by the command that repeats them, and those that failed."""

    runs: dict[str, Measured] = attrs.field(factory=dict)
    failures: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Evidence:
        """Read the runs that all tables' files in a folder tell of. Raises `RunError`."""
        found = cls()
        for path in sorted(folder.glob("*.json")):
            values = read_json(path, "restore it, or move it away")
            try:
                for run in values["runs"]:
                    place = values["environments"][run["environment"]]
                    plain = {k: v for k, v in run.items() if k != "environment"}
                    one = Measured(Trial(**plain), place["versions"], place["machine"])
                    found.runs.setdefault(one.trial.command, one)
                found.failures |= values["failures"]
            except (LookupError, TypeError) as error:
                raise RunError(
                    f"{path} does not have the form of a reproduced table "
                    f"({type(error).__name__}: {error}); move it away, or give another --out"
                ) from None
        return found

    def add(self, results: Results) -> None:
        """Add the runs of a study."""
        for trial in results.trials:
            if trial.failure:
                self.failures[trial.command] = trial.failure
            else:
                self.failures.pop(trial.command, None)
                versions = results.versions[0] if results.versions else {}
                self.runs[trial.command] = Measured(trial, versions, results.machine)

    def by_seed(self, commands: Mapping[int, str]) -> dict[int, Measured]:
        """Return the finished ones of a cell's runs, given its command per seed."""
        return {seed: self.runs[c] for seed, c in commands.items() if c in self.runs}


def write_record(path: Path, facts: Mapping[str, Any], runs: Iterable[Measured]) -> None:
    """Write a table's facts and its runs as JSON. Raises `WriteError`."""
    environments: list[dict[str, Any]] = []
    listed = []
    for run in runs:
        place = {"versions": dict(run.versions), "machine": dict(run.machine)}
        if place not in environments:
            environments.append(place)
        metrics = {
            name: dict(values)
            for name, values in run.trial.metrics.items()
            if name.partition(".")[2] in KEPT
        }
        listed.append(
            {
                "cell": run.trial.cell,
                "seed": run.trial.seed,
                "command": run.trial.command,
                "metrics": metrics,
                "bytes": dict(run.trial.bytes),
                "seconds": run.trial.seconds,
                "environment": environments.index(place),
            }
        )
    make_folder(path.parent, parents=True)
    write_json(path, {**facts, "runs": listed, "environments": environments})
