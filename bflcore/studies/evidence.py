"""What was measured for a table: one record per run, with versions and machine, as JSON."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from filelock import FileLock

from bflcore.errors import RunError
from bflcore.experiments.integrity import digest_of, read_json, write_json
from bflcore.files import make_folder, writing
from bflcore.studies.results import SETTINGS, Results, Trial, read_environment

__all__ = [
    "Evidence",
    "Measured",
    "plain_command",
    "settings_digest",
    "stored_digest",
    "writing_record",
]

FOLDER_OF_DATA = ("--data-dir", "data_dir")  # as a flag, and among the settings of the data


@attrs.frozen
class Measured:
    """A finished run, and where it was made: versions of Python, torch and plugins; the machine.

    `settings` is the digest of its resolved settings; empty in records of earlier versions.
    """

    trial: Trial
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    settings: str = ""

    def value(self, key: str, statistic: str) -> float | None:
        """Return a metric of the last round, or None if the run has none."""
        return self.trial.metrics.get(key, {}).get(statistic)

    def repeats(self, other: Measured) -> bool:
        """Say whether the run has every metric of another one, with the same values."""
        return other.trial.metrics.items() <= self.trial.metrics.items()


@attrs.define
class Evidence:
    """The finished runs that are known, and the reasons of those that failed.

    `runs` maps the command that repeats a run, and then the digest of its settings, to the run;
    `failures` maps commands.
    """

    runs: dict[str, dict[str, Measured]] = attrs.field(factory=dict)
    failures: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Evidence:
        """Read the runs that all tables' files in a folder tell of. Raises `RunError`."""
        found = cls()
        for path in sorted(folder.glob("*.json")):
            found.read_file(path)
        return found

    def read_file(self, path: Path) -> None:
        """Add what a table's file tells of, if it is there. Raises `RunError`."""
        try:
            values = read_json(path, "restore it, or move it away")
            for run in values["runs"]:
                place = values["environments"][run["environment"]]
                plain = {k: v for k, v in run.items() if k not in {"environment", "settings"}}
                settings = run.get("settings", "")
                self.put(Measured(Trial(**plain), place["versions"], place["machine"], settings))
            for command, reason in values["failures"].items():
                self.fail(command, reason)
        except FileNotFoundError:
            return
        except (LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} does not have the form of a reproduced table "
                f"({type(error).__name__}: {error}); move it away, or give another --out"
            ) from None

    def add(self, results: Results) -> None:
        """Add the runs of a study, each with its own versions, machine and settings."""
        for trial in results.trials:
            if trial.failure:
                self.fail(trial.command, trial.failure)
            elif trial.path:
                versions, machine = read_environment(trial.path)
                self.put(Measured(trial, versions, machine, stored_digest(trial.path.parent)))

    def put(self, run: Measured) -> None:
        """Add a finished run.

        One without a digest of its settings is given up for the same run with a digest.
        """
        command = plain_command(run.trial.command)
        run = attrs.evolve(run, trial=attrs.evolve(run.trial, command=command))
        known = self.runs.setdefault(command, {})
        self.failures.pop(command, None)
        if not run.settings and any(one.repeats(run) for one in known.values()):
            return
        if run.settings and "" in known and run.repeats(known[""]):
            run = attrs.evolve(run, machine=run.machine or known[""].machine)
            del known[""]
        known[run.settings] = run

    def fail(self, command: str, reason: str) -> None:
        """Add the reason why a run failed, unless it has succeeded."""
        if (command := plain_command(command)) not in self.runs:
            self.failures[command] = reason

    def update(self, other: Evidence) -> None:
        """Add all that other evidence has."""
        for run in other:
            self.put(run)
        for command, reason in other.failures.items():
            self.fail(command, reason)

    def __iter__(self) -> Iterator[Measured]:
        """Yield the finished runs."""
        return (run for runs in self.runs.values() for run in runs.values())

    def find(self, command: str, settings: str) -> Measured | None:
        """Return the run of a command whose settings have a digest, or that has no digest."""
        known = self.runs.get(plain_command(command), {})
        return known.get(settings, known.get(""))

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write a table's facts with all runs and failures as JSON. Raises `WriteError`."""
        environments: list[dict[str, Any]] = []
        listed = [_plain(run, environments) for run in self]
        found = {"failures": self.failures, "runs": listed, "environments": environments}
        write_json(path, {**facts, **found})


def _plain(run: Measured, environments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run as plain values; its environment is added to those that are listed."""
    place = {"versions": dict(run.versions), "machine": dict(run.machine)}
    if place not in environments:
        environments.append(place)
    return {
        "cell": run.trial.cell,
        "seed": run.trial.seed,
        "command": run.trial.command,
        **({"settings": run.settings} if run.settings else {}),
        "metrics": {name: dict(values) for name, values in run.trial.metrics.items()},
        "bytes": dict(run.trial.bytes),
        "seconds": run.trial.seconds,
        "environment": environments.index(place),
    }


@contextmanager
def writing_record(path: Path) -> Iterator[Evidence]:
    """Yield what a table's file tells of, while no other process writes the file.

    The folder is made if need be. Raises `RunError`.
    """
    make_folder(path.parent, parents=True)
    lock = FileLock(path.with_name(f".{path.stem}.lock"))
    with writing(path):
        lock.acquire()
    try:
        found = Evidence()
        found.read_file(path)
        yield found
    finally:
        lock.release()


def plain_command(command: str) -> str:
    """Return a command without the folder of the data, which decides no result."""
    words = shlex.split(command)
    if FOLDER_OF_DATA[0] in words:
        at = words.index(FOLDER_OF_DATA[0])
        del words[at : at + 2]
    return shlex.join(words)


def settings_digest(values: Mapping[str, Any]) -> str:
    """Return a digest of a cell's resolved settings, but for the folder of the data."""
    data = {name: v for name, v in values.get("data", {}).items() if name != FOLDER_OF_DATA[1]}
    return digest_of({**values, "data": data})


def stored_digest(folder: Path) -> str:
    """Return the digest of the settings that a cell's folder holds; empty if it holds none."""
    try:
        return settings_digest(tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ""
