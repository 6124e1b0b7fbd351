"""Gathering what is compared: the cells of studies, and single runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.integrity import read_json
from bflcore.report.comparison import by_settings
from bflcore.report.reading import Run, read_run, well_formed
from bflcore.studies.results import FILE, STUDY, VERSIONS, Results, collect, read_study
from bflcore.studies.trials import Trial, final_metrics

__all__ = ["Gathered", "gather", "is_study", "read_results"]


@attrs.frozen
class Gathered:
    """The runs of each cell, and all versions that they were made with."""

    groups: dict[str, list[Trial]]
    versions: tuple[Mapping[str, Any], ...]


def is_study(path: Path) -> bool:
    """Return whether a path is the folder of a study, or its ``results.json``."""
    return path.name == FILE or (path / STUDY).is_file() or (path / FILE).is_file()


def read_results(path: Path) -> Results:
    """Return the results of a study, as far as it is. Raises `RunError`."""
    if path.is_file() or not (path / STUDY).is_file():
        return Results.read(path)
    return collect(*read_study(path), path, {})


def gather(paths: Sequence[Path], left_out: Callable[[str], None] = lambda _: None) -> Gathered:
    """Return the runs of each cell; single runs that differ by their seed alone form a cell.

    A cell is called by its own name, or, with several studies, by its study's and its own. Cells of
    different studies are different, whatever their settings. `left_out` is told of each run that
    cannot be read, or that repeats another. Raises `RunError` if none can be read.
    """
    read, reasons = dict[Path, Results | Run](), list[str]()
    for path in paths:
        try:
            place = _folder(path)
            if place in read:
                reasons.append(f"{path} is given twice")
                continue
            read[place] = read_results(path) if is_study(path) else _finished(path, read)
        except RunError as error:
            reasons.append(str(error))
    groups = by_settings([one for one in read.values() if isinstance(one, Run)])
    first = {id(group.runs[0]): group.runs for group in groups}
    prefixes = _prefixes([place for place, one in read.items() if isinstance(one, Results)])
    found: dict[str, list[Trial]] = {}
    for place, one in read.items():
        if isinstance(one, Results):
            for cell, trials in one.groups.items():
                found[_free(prefixes[place] + cell, found)] = list(trials)
        elif id(one) in first:
            name = _free(one.cell or one.label, found)
            found[name] = [_trial(run, name) for run in first[id(one)]]
    if not found:
        raise RunError("; ".join(reasons) or "nothing is given to compare")
    for reason in reasons:
        left_out(reason)
    return Gathered(found, tuple(version for one in read.values() for version in _versions(one)))


def _folder(path: Path) -> Path:
    return (path.parent if path.name == FILE else path).resolve()


def _finished(path: Path, read: Mapping[Path, Results | Run]) -> Run:
    """Read a run. Raises `RunError` if it is not finished, or the same as one that was read."""
    run = read_run(path)
    if run.unfinished:
        raise RunError(f"{path}: {run.unfinished}")
    with well_formed(run):
        _trial(run, "")
        same = run.settings, run.seed, run.partitioned
        for one in read.values():
            if isinstance(one, Run) and (one.settings, one.seed, one.partitioned) == same:
                raise RunError(f"{path}: the same settings, data and seed as {one.path}")
    return run


def _versions(one: Results | Run) -> Sequence[Mapping[str, Any]]:
    if isinstance(one, Results):
        return one.versions
    return [{name: one.environment[name] for name in VERSIONS if name in one.environment}]


def _prefixes(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the last parts of each folder's path, as many as tell it from the others."""
    if len(folders) == 1:
        return {folders[0]: ""}
    depth = max((len(folder.parts) for folder in folders), default=0)
    ends = {folder: [folder.parts[-n:] for n in range(1, depth + 1)] for folder in folders}
    every = [end for known in ends.values() for end in dict.fromkeys(known)]
    return {
        folder: Path(*next(end for end in known if every.count(end) == 1)).as_posix() + "/"
        for folder, known in ends.items()
    }


def _free(label: str, taken: Mapping[str, object]) -> str:
    names = (label, *(f"{label} ({number})" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _trial(run: Run, cell: str) -> Trial:
    seconds = float(read_json(run.path / "summary.json")["seconds"]["total"])
    command = shlex.join(["bfl", "run", str(run.path / "experiment.toml")])
    metrics = final_metrics(run.summary)
    return Trial(cell, run.seed, command, metrics, seconds=seconds, path=run.path)
