"""The run directory: what a run keeps, and whether it can be resumed unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from filelock import FileLock, Timeout

from bflcore.errors import RunError, WriteError
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.experiments.description import FILE
from bflcore.experiments.environment import SETTINGS, environment, is_of, used_distributions
from bflcore.experiments.integrity import (
    add_digest,
    digest_of,
    parse_line,
    read_json,
    write_json,
)
from bflcore.experiments.models import Models
from bflcore.files import ASIDE, append_text, make_folder, write_text, writing
from bflcore.models.user import UserModel, file_name

if TYPE_CHECKING:
    from bflcore.experiments.prepare import Prepared
    from bflcore.experiments.records import Record
    from bflcore.experiments.resolve import Experiment
    from bflcore.models.base import Model
    from bflcore.registry.loading import Registry

__all__ = ["RunDirectory", "default_directory"]


class RunDirectory:
    """The folder of one run. A file is replaced as a whole, so that readers find it complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = ""  # of the last line of metrics.jsonl, which covers all lines before it

    @classmethod
    def create(cls, path: Path, prepared: Prepared, registry: Registry) -> RunDirectory:
        """Create the folder and write what is known before the first round.

        Raises `RunError` when it exists, and `WriteError`, leaving nothing, when it cannot be
        written.
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
        try:
            directory._begin(prepared, registry)
        except WriteError as error:
            raise WriteError(f"{error} and start the run again") from None
        finally:
            if not (path / "environment.json").exists():
                shutil.rmtree(path, ignore_errors=True)
        return directory

    def _begin(self, prepared: Prepared, registry: Registry) -> None:
        """Write the files of a run that begins."""
        write_text(self.path / "experiment.toml", tomli_w.dumps(prepared.experiment.as_toml()))
        prepared.partition.save(self.path / "partition.npz")
        self.describe(prepared)
        self.keep_source(prepared.experiment.model)
        # Last: with this file, the folder is complete and the run can be resumed.
        written = environment(prepared, registry)
        self.write_json("environment.json", {"run": digest_of(written), **written})

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the directory of a run that was started. Raises `RunError` when there is none."""
        if not (path / "experiment.toml").is_file():
            raise RunError(f"{path} is not a run directory; give the folder that bfl run wrote")
        if not (path / "environment.json").is_file():
            raise RunError(
                f"{path / 'environment.json'} is missing: the run was interrupted during set-up; "
                f"start it again: bfl run {path / 'experiment.toml'}"
            )
        return cls(path)

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints."""
        return Checkpoints(self.path / "checkpoint", self._environment().get("run", ""))

    @property
    def models(self) -> Models:
        """The clients' models, stored at the end of the run."""
        return Models(self.path / "models")

    @property
    def metrics(self) -> Path:
        """The file with one line per evaluated round."""
        return self.path / "metrics.jsonl"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write indented JSON with a digest."""
        write_json(self.path / name, value)

    def describe(self, prepared: Prepared) -> None:
        """Write ``data.json``, unless it is there: a run is complete without its data."""
        if not (self.path / FILE).exists():
            self.write_json(FILE, prepared.description.as_json())

    @property
    def sources(self) -> Path:
        """The folder with the module of the user's own network, if the run has one."""
        return self.path / "model"

    def keep_source(self, model: Model) -> None:
        """Copy the module of the user's own network into `sources`."""
        if isinstance(model, UserModel) and model.source:
            make_folder(self.sources)
            text = model.source.read_text(encoding="utf-8")
            write_text(self.sources / file_name(model.name), text)

    def append(self, record: Record) -> None:
        """Add one line to ``metrics.jsonl`` and flush it. Raises `WriteError`."""
        line = add_digest(record, self.digest)
        append_text(self.metrics, json.dumps(line) + "\n")
        self.digest = line["digest"]

    def rewind(self, round: int) -> list[Record]:
        """Remove the lines after a round from ``metrics.jsonl``; return the others.

        A line that is incomplete, as a killed process leaves it, or damaged is removed, too, with
        all that follow.
        """
        self.digest = ""
        if not self.metrics.exists():
            return []
        kept: list[Record] = []
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        with suppress(ValueError, RecursionError):
            for line in lines:
                record, digest = parse_line(line, self.digest)
                if record["round"] > round:
                    break
                self.digest = digest
                kept.append(record)
        write_text(self.metrics, "".join(f"{line}\n" for line in lines[: len(kept)]))
        return kept

    def changes(self, prepared: Prepared, registry: Registry) -> list[str]:
        """Return what has changed since the run started and may change its results.

        Raises `RunError` when ``environment.json`` cannot be read.
        """
        then = self._environment()
        try:
            versions = {"torch": then["torch"], **then["distributions"]}
            prints = dict(then["fingerprints"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.path / 'environment.json'} cannot be read ({error!r}); start the run again"
            ) from None
        now = environment(prepared, registry)
        installed = {"torch": now["torch"], **now["distributions"]}
        used = ["torch", *sorted(used_distributions(prepared.experiment, registry))]
        changed = [
            f"{name} was {versions.get(name, 'absent')} and is {installed[name]}"
            for name in used
            if versions.get(name) != installed[name]
        ]
        marks = now["fingerprints"]
        if is_of(prepared.experiment.as_toml(), prints.get(SETTINGS)):
            del marks[SETTINGS]
        return changed + [f"{k} changed" for k, mark in marks.items() if prints.get(k) != mark]

    def note_changes(
        self, changes: list[str], prepared: Prepared, registry: Registry, round: int
    ) -> None:
        """Write the environment as it is now, with a note that it changed after a round."""
        before = self._environment()
        forced = [*before.get("forced", []), {"round": round, "changes": changes}]
        now = {"run": before.get("run", ""), **environment(prepared, registry), "forced": forced}
        self.write_json("environment.json", now)

    def _environment(self) -> Record:
        """Return what ``environment.json`` holds. Raises `RunError` when it cannot be read."""
        return read_json(self.path / "environment.json")

    @property
    def memories(self) -> Path:
        """The folder for memories that do not fit into RAM; there while the run is executed."""
        return self.path / "memories"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing here; the lock of a killed process is released.

        What a killed process left half-written is removed, and the memories on the disk are, too,
        also at the end. Raises `RunError` while another process holds the lock, and `WriteError` if
        nothing can be written here.
        """
        # The file stays in the folder: what counts is whether a process holds the lock.
        held = FileLock(self.path / ".lock", blocking=False)
        with writing(self.path / ".lock"):
            try:
                held.acquire()
            except Timeout:
                raise RunError(
                    f"another process is running in {self.path}; wait for it or stop it"
                ) from None
        try:
            self._tidy()
            yield
        finally:
            self._tidy()
            held.release()

    def _tidy(self) -> None:
        shutil.rmtree(self.memories, ignore_errors=True)
        for path in self.path.glob(f".*{ASIDE}"):
            with suppress(OSError):
                path.unlink()


def default_directory(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """Return a folder that does not exist yet: ``runs/bpfed-mnist5k-0``, ``...-0-2``, ..."""
    stem = f"{experiment.method}-{Path(experiment.data.data).stem}-{experiment.run.seed}"
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(root / name for name in names if not (root / name).exists())
