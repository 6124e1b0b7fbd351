"""Reading run directories for reports and comparisons."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.environment import check_settings, settings_digest
from bflcore.experiments.integrity import read_json, read_lines
from bflcore.experiments.records import summary_of
from bflcore.experiments.samples import FILE as SAMPLES

__all__ = [
    "CELL",
    "Run",
    "by_client",
    "plain",
    "read_run",
    "read_runs",
    "well_formed",
    "without_steering",
]

CELL = "cell.toml"  # beside the runs of a study's cell
NAMED = 3  # runs of many, in an error
DATA = "the data or its partition"  # the name of a fingerprint in environment.json

# Control characters, halves of characters, and marks that turn the direction of what follows.
STEERING = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
)


def plain(text: object) -> str:
    """Return a name as one line of text that steers neither a terminal nor a browser."""
    return without_steering(" ".join(str(text).splitlines()))


def without_steering(text: str) -> str:
    """Return a text whose characters are all visible, spaces and line breaks apart."""
    return STEERING.sub("\N{REPLACEMENT CHARACTER}", text)


@attrs.frozen
class Run:
    """A run, as its folder describes it; `unfinished` says how far it is if it has not ended."""

    path: Path
    experiment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    evaluation: dict[str, Any]
    environment: dict[str, Any]
    description: dict[str, Any] = attrs.field(factory=dict)  # data.json
    unfinished: str = ""
    samples: dict[str, Any] = attrs.field(factory=dict)  # samples.json
    cell: str = ""  # of the study that the run belongs to

    @property
    def label(self) -> str:
        """The cell and the folder's name, by which a comparison tells runs apart."""
        name = self.path.resolve().name
        return plain(f"{self.cell}/{name}" if self.cell else name)

    @property
    def seed(self) -> int:
        """The random seed."""
        return int(self.experiment["seed"])

    @cached_property
    def settings(self) -> str:
        """A digest of the settings, the seed apart, and of the user's own data and network.

        Runs that share it differ in the seed alone.
        """
        values = {name: value for name, value in self.experiment.items() if name != "seed"}
        return settings_digest(values | {"sources": self.environment.get("sources", {})})

    @property
    def classifies(self) -> bool:
        """Whether the task is classification."""
        task = self.description.get("task")
        if task:
            return bool(task == "classification")
        return not any("personal.rmse" in record for record in self.records)

    @property
    def partitioned(self) -> str | None:
        """The digest of the data and their partition, which runs on the same clients share."""
        found: str | None = self.environment.get("fingerprints", {}).get(DATA)
        return found

    @property
    def untested(self) -> list[str]:
        """The names of the clients without test samples."""
        clients = self.description.get("clients", [])
        if not any(one["train"] or one["test"] for one in clients):
            return []  # they were counted nowhere: each is on its owner's machine
        return [self.client(i) for i, one in enumerate(clients) if not one["test"]]

    @property
    def tested(self) -> list[dict[str, Any]]:
        """The metrics of each client's own model at the last evaluation, by client."""
        found: list[dict[str, Any]] = self.evaluation.get("personal", {}).get("clients", [])
        return found

    @property
    def worst(self) -> dict[str, Any] | None:
        """The client with the lowest accuracy (of a regression: the largest error), if any."""
        key, sign = ("accuracy", 1) if self.classifies else ("rmse", -1)
        known = [client for client in self.tested if key in client]
        return min(known, key=lambda client: sign * client[key], default=None)

    def client(self, number: int) -> str:
        """Return a client's name: the owner's id, where the data have owners."""
        clients = self.description.get("clients", [])
        return plain(clients[number]["id"] if 0 <= number < len(clients) else number)

    def class_name(self, label: int) -> str:
        """Return a class's name, or its label."""
        names = self.description.get("classes", [])
        return plain(names[label] if label < len(names) else label)


def by_client(evaluation: Mapping[str, Any], metric: str) -> dict[int, float]:
    """Return a metric of each client, from the content of a run's ``evaluation.json``.

    Clients for which it is not defined are left out.
    """
    group, _, name = metric.rpartition(".")
    clients = evaluation.get(group, {}).get("clients", [])
    return {one["client"]: float(one[name]) for one in clients if name in one}


def read_run(path: Path) -> Run:
    """Read a run directory, also of a run that has not finished.

    Raises `RunError` naming the file that is missing or malformed.
    """
    if not (path / "experiment.toml").is_file():
        raise RunError(f"{path} is not a run directory; give the folder that bfl run wrote")
    experiment = _read(path / "experiment.toml", _toml)
    check_settings(path, experiment)
    finished, above = (path / "summary.json").exists(), path.resolve().parent
    records = _read(path / "metrics.jsonl", lambda file: read_lines(file, growing=not finished))
    summary, unfinished = {}, ""
    if finished:
        summary = _read(path / "summary.json", read_json)
    elif records:
        summary, unfinished = _read(
            path / "metrics.jsonl", lambda _: _so_far(path, experiment, records)
        )
    else:
        raise RunError(f"{path}: no round has been evaluated; {_continue(path)}")
    return Run(
        path,
        experiment,
        records,
        summary,
        _read(path / "evaluation.json", read_json),
        _read(path / "environment.json", read_json),
        _if_there(path / "data.json"),
        unfinished,
        _if_there(path / SAMPLES),
        above.name if (above / CELL).is_file() else "",
    )


def _if_there(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = _read(path, read_json) if path.exists() else {}
    return found


@contextmanager
def well_formed(*runs: Run) -> Iterator[None]:
    """Raise `RunError` where a file of the runs holds other values than a run writes."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        said = " ".join(str(error).split())[:200]
        named = ", ".join(str(run.path) for run in runs[:NAMED])
        others = f" and {len(runs) - NAMED} more runs" if len(runs) > NAMED else ""
        raise RunError(
            f"{named}{others}: a file does not have the form that a run "
            f"writes ({type(error).__name__}: {said}); restore it, or start the run again"
        ) from error


def read_runs(paths: Sequence[Path], left_out: Callable[[str], None] = lambda _: None) -> list[Run]:
    """Read several runs; `left_out` is told of each that cannot be read.

    Cells of the same name are called by their studies', too. Raises `RunError` if none can be read.
    """
    runs, reasons = [], []
    for path in paths:
        try:
            runs.append(read_run(path))
        except RunError as error:
            reasons.append(str(error))
    if not runs:
        raise RunError("; ".join(reasons))
    for reason in reasons:
        left_out(reason)
    studies: dict[str, set[Path]] = {}
    for run in runs:
        studies.setdefault(run.cell, set()).add(_study(run))
    return [
        attrs.evolve(run, cell=f"{_study(run).name}/{run.cell}")
        if run.cell and len(studies[run.cell]) > 1
        else run
        for run in runs
    ]


def _study(run: Run) -> Path:
    return run.path.resolve().parents[1]


def _so_far(
    path: Path, experiment: Mapping[str, Any], records: list[dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Return the summary of a run until its last evaluation, and how far that is."""
    last = records[-1]
    seconds = {"total": sum(last["seconds"].values()), **last["seconds"]}
    dropped = [entry for record in records for entry in record["dropped"]]
    summary = summary_of(experiment["method"], records, seconds, last["bytes"], dropped)
    rounds = experiment["rounds"]
    return summary, f"round {last['round']} of {rounds}, unfinished: {_continue(path)}"


def _continue(path: Path) -> str:
    return f"continue with: bfl resume {shlex.quote(str(path))}"


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing: no round has been evaluated; {_continue(path.parent)}"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"{path} cannot be read ({said}); start the run again") from None
