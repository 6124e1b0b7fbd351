"""The run directory: what a run keeps, and whether it can go on from there."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from bflcore.checkpoint import Checkpoints
from bflcore.errors import OptionError, RunError
from bflcore.hookspecs import HOOKS

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.experiment import Experiment
    from bflcore.problem import Problem
    from bflcore.registry import Registry
    from bflcore.runs import Prepared
    from bflcore.summary import Record

__all__ = ["RunDirectory", "default_directory", "used"]

# Settings that may differ when a run goes on: its results do not depend on them.
FREE = ("engine", "checkpoint_every", "min_clients", "log")


class RunDirectory:
    """The folder of one run; every file is complete at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, prepared: Prepared, registry: Registry) -> RunDirectory:
        """Make the folder and write what is known before the first round.

        Raises `RunError` when it exists or cannot be written.
        """
        if path.exists():
            raise RunError(f"--out: {path} exists; choose another folder or remove it")
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise RunError(
                f"--out: {path} cannot be created ({error.strerror}); choose a writable folder"
            ) from None
        directory = cls(path)
        directory.write_text("experiment.toml", tomli_w.dumps(prepared.experiment.as_toml()))
        prepared.partition.save(path / "partition.npz")
        # Last: a folder with this file is complete, and can go on.
        directory.write_json("environment.json", _environment(prepared, registry))
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the directory of a run that began. Raises `RunError` when there is none."""
        if not (path / "experiment.toml").is_file():
            raise RunError(f"{path} is no run directory; give the folder that bfl run wrote")
        if not (path / "environment.json").is_file():
            raise RunError(
                f"{path / 'environment.json'} is missing: the run stopped before it began; "
                f"bfl run {path / 'experiment.toml'}"
            )
        return cls(path)

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints."""
        return Checkpoints(self.path / "checkpoint")

    @property
    def metrics(self) -> Path:
        """The file with one line an evaluated round."""
        return self.path / "metrics.jsonl"

    def write_text(self, name: str, text: str) -> None:
        """Write a file aside and rename it into place."""
        aside = self.path / f".{name}.writing"
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.path / name)

    def write_json(self, name: str, value: object) -> None:
        """Write indented JSON."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def append(self, record: Record) -> None:
        """Add one line to ``metrics.jsonl`` and flush it."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, round: int) -> list[Record]:
        """Take the lines after a round out of ``metrics.jsonl``; return the others.

        What a kill left half written goes, too.
        """
        if not self.metrics.exists():
            return []
        kept: list[tuple[str, Record]] = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if record["round"] <= round:
                    kept.append((line, record))
        self.write_text("metrics.jsonl", "".join(f"{line}\n" for line, _ in kept))
        return [record for _, record in kept]

    def changes(self, prepared: Prepared, registry: Registry) -> list[str]:
        """Say what differs from when the run began and may change its results.

        Raises `RunError` when ``environment.json`` cannot be read.
        """
        try:
            then: Any = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
            versions, prints = then["distributions"], then["fingerprints"]
            torch = then["torch"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.path / 'environment.json'} cannot be read ({error!r}); run it again"
            ) from None
        now = _environment(prepared, registry)
        found = [("torch", torch, now["torch"])] + [
            (name, versions.get(name, "absent"), now["distributions"][name])
            for name in sorted(used(prepared.experiment, registry))
        ]
        changed = [f"{name} was {old} and is {new}" for name, old, new in found if old != new]
        marks = now["fingerprints"].items()
        return changed + [f"{name} changed" for name, mark in marks if prints.get(name) != mark]

    def note_changes(
        self, changes: list[str], prepared: Prepared, registry: Registry, round: int
    ) -> None:
        """Write the environment as it is now, and keep that it changed after a round."""
        path = self.path / "environment.json"
        before = json.loads(path.read_text(encoding="utf-8")).get("forced", [])
        forced = [*before, {"round": round, "changes": changes}]
        self.write_json(path.name, _environment(prepared, registry) | {"forced": forced})

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing here; a kill lets go.

        Raises `RunError` while another process holds the directory.
        """
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise RunError(
                f"{self.path} is in use by a run that goes on; wait for it, or stop it first"
            ) from None
        finally:
            os.close(descriptor)


def default_directory(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """Return a folder that does not exist yet: ``runs/bpfed-mnist5k-0``, ``...-0-2``, ..."""
    stem = f"{experiment.method}-{Path(experiment.data.data).stem}-{experiment.run.seed}"
    return next(path for path in _numbered(root / stem) if not path.exists())


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def _environment(prepared: Prepared, registry: Registry) -> Record:
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "distributions": {d.name: d.version for d in registry.distributions},
        "fingerprints": {
            "experiment.toml": _settings(prepared.experiment),
            "the data or its partition": _data(prepared.problem),
            "the initial network": _digest([prepared.problem.initial]),
        },
    }


def used(experiment: Experiment, registry: Registry) -> set[str]:
    """Return the distributions whose parts the experiment uses."""
    names = {"method": experiment.method} | {
        kind: part.name
        for kind in HOOKS
        if (part := getattr(experiment, kind, None)) is not None and kind != "method"
    }
    if experiment.source is not None:
        names["dataset"] = experiment.source.name
    used = {registry.distributions[0].name}  # the core
    for kind, name in names.items():
        with suppress(OptionError):  # a model of the user's own
            used.add(registry.owner(kind, name))
    return used


def _settings(experiment: Experiment) -> str:
    """Return a digest of the settings that decide the results."""
    values = {k: v for k, v in experiment.as_toml().items() if k not in FREE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _data(problem: Problem) -> str:
    """Return a digest of every client's samples, in order."""
    parts = (problem.train, problem.test)
    return _digest(
        [tensor for part in parts for tensor in (part.x, part.y)],
        repr([(part.start, part.end) for part in parts]),
    )


def _digest(tensors: list[Tensor], text: str = "") -> str:
    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().reshape(-1).view("uint8").data)
    return found.hexdigest()
