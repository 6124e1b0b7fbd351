"""Executing a study: every cell with every seed, side by side, again where it stopped."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import tomli_w
from filelock import FileLock, Timeout

from bflcore.api.runs import resolve_call
from bflcore.data.user import is_own
from bflcore.engines.local import Local, cores
from bflcore.errors import BflError, OptionError, RunError
from bflcore.experiments.environment import MAY_CHANGE
from bflcore.files import make_folder, write_text, writing
from bflcore.models.digests import source_digests
from bflcore.registry.loading import load_registry
from bflcore.studies.cells import Cell, check_cells
from bflcore.studies.forecast import Check, look_ahead
from bflcore.studies.results import SETTINGS, Results, collect, run_folder, write_study
from bflcore.studies.worker import Task
from bflcore.studies.workers import run_tasks

if TYPE_CHECKING:
    from bflcore.data.tables import Table
    from bflcore.data.user import Arrays
    from bflcore.experiments.resolve import Experiment

__all__ = ["Progress", "Standing", "duration", "execute", "resolve_cells", "settings_of"]


@attrs.frozen
class Standing:
    """How far a study is: runs that are done (or failed) of all, and those that are running.

    `left` is an estimate of the remaining seconds, None before the first run has ended. `ended` is
    the folder of the run that has just ended, with the `reason` if it failed.
    """

    done: int
    total: int
    failed: int
    running: tuple[str, ...]
    left: float | None = None
    ended: str = ""
    reason: str = ""

    def line(self, folder: Path) -> str:
        """Return a line at the beginning, and one for each run that has ended; else no text."""
        if self.ended:
            said = f"failed: {self.reason}" if self.reason else "done"
            left = f"  {duration(self.left)} left" if self.left else ""
            return f"{self.done}/{self.total}  {self.ended}  {said}{left}"
        if self.running:
            return ""
        return f"{self.total} runs in {folder}, {self.done} of them finished"


Progress = Callable[[Standing], None]


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def execute(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    folder: Path,
    *,
    jobs: int | None = None,
    progress: Progress = lambda _: None,
    check: Check | None = None,
) -> Results:
    """Run every cell with every seed, each in ``CELL/seed-N`` of a folder; return the results.

    Runs that are finished are kept, others continue where they stopped. `jobs` runs are executed
    at a time (default: one per core); results do not depend on it. A run that fails is recorded
    with its reason, and the others go on. `progress` is called when a run begins or ends. The
    results are written to ``results.json``.

    Data sets are loaded, and downloaded where the cells say so, before the first run starts, and
    `check` is called with the names of the metrics that runs will record. Raises `BflError` before
    anything is written if a cell or its data are not valid, if runs that are there were made with
    other settings, or while another process executes a study in the folder.
    """
    if jobs is not None and jobs < 1:
        raise OptionError(f"--jobs: {jobs} is not allowed; allowed: at least 1")
    if not seeds:
        raise OptionError("--seeds: none is given; give at least one, for example 0-4")
    found = _resolve(cells)
    experiments = {name: experiment for name, (experiment, _) in found.items()}
    settings = {name: _settings(*resolved) for name, resolved in found.items()}
    _check_same(settings, folder)
    look_ahead(found, seeds, folder, check)
    with _locked(folder):
        write_study([_anchored_cell(cell) for cell in cells], seeds, folder)
        for name, values in settings.items():
            make_folder(folder / name)
            write_text(folder / name / SETTINGS, tomli_w.dumps(values))
        tasks = {
            run_folder(cell.name, seed): _task(cell, seed, folder, experiments[cell.name])
            for seed in seeds  # one of every cell before the next: they can be compared early
            for cell in cells
        }
        failures = _run_all(tasks, jobs or cores(), progress)
        results = collect(cells, seeds, folder, failures)
        results.write()
    return results


def resolve_cells(cells: Sequence[Cell]) -> dict[str, Experiment]:
    """Return each cell's experiment by the cell's name. Nothing is loaded.

    Raises `BflError`, naming the cell, for the first one that is not valid.
    """
    return {name: experiment for name, (experiment, _) in _resolve(cells).items()}


def settings_of(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return what decides each cell's results but for the seed, by the cell's name.

    Raises `BflError`, naming the cell, for the first one that is not valid.
    """
    return {name: _settings(*resolved) for name, resolved in _resolve(cells).items()}


def _resolve(cells: Sequence[Cell]) -> dict[str, tuple[Experiment, Table | Arrays | None]]:
    """Return each cell's experiment, and its data where Python holds them."""
    check_cells(cells)
    registry, found = load_registry(), {}
    for cell in cells:
        try:
            flags = _anchored(cell.flags)
            found[cell.name] = resolve_call(registry, cell.method, flags, cell.options)
        except BflError as error:
            raise type(error)(f"cell {cell.name}: {error}") from None
    return found


def _settings(experiment: Experiment, own: Table | Arrays | None) -> dict[str, Any]:
    """Return what decides a cell's results but for the seed, as it is read from a file."""
    values = experiment.as_toml() | {"chunk": getattr(experiment.engine, "chunk", 0)}
    values |= source_digests(experiment.dataset, experiment.data, experiment.model, own)
    plain = {name: value for name, value in values.items() if name not in {*MAY_CHANGE, "seed"}}
    return _without_place(tomllib.loads(tomli_w.dumps(plain)))


def _without_place(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without where the data are, and whether they were downloaded."""
    data = {name: value for name, value in settings["data"].items() if name != "data_dir"}
    return settings | {"data": data | {"download": False}}


def _anchored(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags whose paths are absolute."""
    found = {name: str(v) if isinstance(v, Path) else v for name, v in flags.items()}
    for name in ("data", "data_dir"):
        given = found.get(name)
        if isinstance(given, str) and (name == "data_dir" or is_own(given)):
            found[name] = str(Path(given).absolute())
    return found


def _anchored_cell(cell: Cell) -> Cell:
    """Return a cell that can be executed from any folder."""
    method = cell.method
    if method.endswith(".toml"):
        method = str(Path(method).absolute())
    return attrs.evolve(cell, method=method, flags=_anchored(cell.flags))


def _check_same(settings: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Raise `RunError` if a cell's folder has runs that were made with other settings."""
    for name, now in settings.items():
        path = folder / name
        if not any(path.glob("seed-*")):
            continue
        try:
            then = _without_place(tomllib.loads((path / SETTINGS).read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise RunError(
                f"{path} has runs, but no {SETTINGS} that can be read; choose another folder, or "
                "remove it"
            ) from None
        if then != now:
            before, after = _flat(then), _flat(now)
            changed = [key for key in before | after if before.get(key) != after.get(key)]
            said = "; ".join(
                f"{key} was {before.get(key, 'not set')} and is {after.get(key, 'not set')}"
                for key in changed[:3]
            )
            more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise RunError(
                f"{path}: its runs were made with other settings ({said}{more}); choose another "
                "folder, or remove it"
            )


def _flat(values: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = _flat(value, f"{within}{key}.") if isinstance(value, Mapping) else None
        found |= inner if inner is not None else {f"{within}{key}": value}
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other studies out of a folder, which is made if need be."""
    make_folder(folder, parents=True)
    held = FileLock(folder / ".lock", blocking=False)
    with writing(folder / ".lock"):
        try:
            held.acquire()
        except Timeout:
            raise RunError(
                f"another process is executing runs in {folder}; wait for it or stop it"
            ) from None
    try:
        yield
    finally:
        held.release()


def _task(cell: Cell, seed: int, folder: Path, experiment: Experiment) -> Task:
    """Return a run of a cell, alone in its process unless the cell asks for more."""
    flags = {**cell.flags, "seed": seed}
    if isinstance(experiment.engine, Local):
        flags = {"workers": 1, **flags}
    if experiment.data.download:
        flags["download"] = False  # the data are there by now
    return Task(folder / run_folder(cell.name, seed), cell.method, flags, cell.options)


def _run_all(tasks: Mapping[str, Task], jobs: int, progress: Progress) -> dict[str, str]:
    """Run what is not finished; return the failed runs' folders with the reasons."""
    due = {name: t for name, t in tasks.items() if not (t.path / "summary.json").is_file()}
    names, kept = list(due), len(tasks) - len(due)
    began, ended = time.monotonic(), 0
    failures, running = dict[str, str](), dict[int, str]()
    progress(Standing(kept, len(tasks), 0, ()))
    with closing(run_tasks(list(due.values()), jobs)) as events:
        for event in events:
            name = names[event.task]
            if not event.ended:
                running[event.task] = name
            else:
                ended += 1
                del running[event.task]
                if event.reason:
                    failures[name] = event.reason
            left = (time.monotonic() - began) / ended * (len(due) - ended) if ended else None
            last = (name, event.reason) if event.ended else ("", "")
            standing = kept + ended, len(tasks), len(failures), tuple(running.values())
            progress(Standing(*standing, left, *last))
    return failures
