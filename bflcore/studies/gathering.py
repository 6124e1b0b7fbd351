"""Gathering what is compared: the cells of studies, and single runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from bflcore.errors import RunError
from bflcore.experiments.environment import settings_digest
from bflcore.experiments.integrity import read_json
from bflcore.report.reading import Run, read_run, well_formed
from bflcore.studies.results import FILE, STUDY, Results, collect, read_study
from bflcore.studies.trials import Trial, final_metrics

__all__ = ["gather", "is_study", "read_results"]


def is_study(path: Path) -> bool:
    """Return whether a path is the folder of a study, or its ``results.json``."""
    return path.name == FILE or (path / STUDY).is_file() or (path / FILE).is_file()


def read_results(path: Path) -> Results:
    """Return the results of a study, as far as it is. Raises `RunError`."""
    if path.is_file() or not (path / STUDY).is_file():
        return Results.read(path)
    return collect(*read_study(path), path, {})


def gather(
    paths: Sequence[Path], left_out: Callable[[str], None] = lambda _: None
) -> dict[str, list[Trial]]:
    """Return the runs of each cell; single runs that differ by their seed alone form a cell.

    A cell is called by its own name, or, with several studies, by its study's and its own.
    `left_out` is told of each run that cannot be read. Raises `RunError` if none can be.
    """
    studies = [path for path in paths if is_study(path)]
    found: dict[str, list[Trial]] = {}
    cells: dict[str, str] = {}  # a digest of the settings -> the name of the first run's cell
    reasons = []
    for path in paths:
        try:
            if path in studies:
                prefix = f"{_name(path)}/" if len(studies) > 1 else ""
                for cell, trials in read_results(path).groups.items():
                    found.setdefault(prefix + cell, []).extend(trials)
                continue
            run = read_run(path)
        except RunError as error:
            reasons.append(str(error))
            continue
        if run.unfinished:
            reasons.append(f"{path}: {run.unfinished}")
            continue
        with well_formed(run):
            alike = settings_digest({k: v for k, v in run.experiment.items() if k != "seed"})
            cell = cells.setdefault(alike, _free(run.cell or run.label, found))
            found.setdefault(cell, []).append(_trial(run, cell))
    if not found:
        raise RunError("; ".join(reasons) or "nothing is given to compare")
    for reason in reasons:
        left_out(reason)
    return {cell: _distinct(trials, left_out) for cell, trials in found.items()}


def _name(path: Path) -> str:
    folder = path.parent if path.name == FILE else path
    return folder.resolve().name


def _free(label: str, taken: dict[str, list[Trial]]) -> str:
    names = (label, *(f"{label} ({number})" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _trial(run: Run, cell: str) -> Trial:
    seconds = float(read_json(run.path / "summary.json")["seconds"]["total"])
    command = shlex.join(["bfl", "run", str(run.path / "experiment.toml")])
    metrics = final_metrics(run.summary)
    seed = int(run.experiment["seed"])
    return Trial(cell, seed, command, metrics, seconds=seconds, path=run.path)


def _distinct(trials: Sequence[Trial], left_out: Callable[[str], None]) -> list[Trial]:
    """Return one run per seed: a run that was repeated counts once."""
    kept: dict[int, Trial] = {}
    for trial in trials:
        if kept.setdefault(trial.seed, trial) is not trial:
            left_out(f"{trial.path}: the same settings and seed as {kept[trial.seed].path}")
    return list(kept.values())
