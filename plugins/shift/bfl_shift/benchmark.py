"""The benchmark: train every method with every seed, then ask its clients about shifted samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bfl_shift import scoring
from bfl_shift.scoring import Scored, data_set
from bfl_shift.settings import ALONE, APART, CLEAN, LEFT_OUT, Setting, cell_of, named
from bfl_shift.shifts import Shift
from bflcore.errors import BflError, OptionError, unknown
from bflcore.registry.loading import load_registry
from bflcore.studies.cells import Cell
from bflcore.studies.execution import Progress, duration, execute, resolve_cells
from bflcore.studies.results import Trial, run_folder

__all__ = ["Benchmark", "Found", "chosen_methods"]


@attrs.frozen
class Found:
    """What the benchmark found: scores by training, method and seed, and the reasons for gaps.

    `trials` are the runs with their commands and seconds; `scoring` are the seconds that it took to
    score them, by folder.
    """

    scores: Mapping[tuple[str, str, int], Scored]
    missing: tuple[tuple[str, str, int, str], ...]
    trials: tuple[Trial, ...]
    scoring: Mapping[str, float]
    versions: tuple[Mapping[str, Any], ...]
    machine: Mapping[str, Any]


@attrs.frozen
class Benchmark:
    """A setting with the methods, shifts and seeds asked for; runs are kept in `folder`."""

    setting: Setting
    methods: tuple[str, ...]
    shifts: tuple[Shift, ...]
    seeds: tuple[int, ...]
    folder: Path

    def cells(self) -> list[Cell]:
        """Return the trainings that the shifts need, of every method."""
        needed = {shift.training for shift in self.shifts}
        trainings = [name for name in self.setting.trainings if name in needed]
        return [cell_of(self.setting, t, m) for t in trainings for m in self.methods]

    def of(self, training: str) -> tuple[Shift, ...]:
        """Return the shifts of one training."""
        return tuple(shift for shift in self.shifts if shift.training == training)

    def execute(self, jobs: int | None, progress: Progress, say: Callable[[str], None]) -> Found:
        """Do what is not done yet, and return everything.

        `progress` is called when a training begins or ends; `say` gets a line at each tenth of the
        scoring. Raises `BflError` before anything is written if a cell or a data set is not valid.
        """
        for shift in self.shifts:
            if shift.foreign:
                _check_data(shift)
        folder = self.folder / "runs"
        trained = execute(self.cells(), self.seeds, folder, jobs=jobs, progress=progress)
        scores: dict[tuple[str, str, int], Scored] = {}
        missing: list[tuple[str, str, int, str]] = []
        spent: dict[str, float] = {}
        total, began = len(trained.trials), time.monotonic()
        for number, trial in enumerate(trained.trials, 1):
            run, reason = (*named(trial.cell), trial.seed), trial.failure
            if not reason:
                try:
                    scores[run], spent[run_folder(trial.cell, trial.seed)] = self._score(trial)
                except BflError as error:
                    reason = str(error)
            if reason:
                missing.append((*run, reason))
            if 10 * number // total > 10 * (number - 1) // total:
                left = (time.monotonic() - began) / number * (total - number)
                say(f"scored: {number} of {total} runs, {duration(left)} left")
        found = trained.trials, spent, trained.versions, trained.machine
        return Found(scores, tuple(missing), *found)

    def _score(self, trial: Trial) -> tuple[Scored, float]:
        """Return the scores of a finished run, and the seconds that it took to score it."""
        training, _ = named(trial.cell)
        run, seed = run_folder(trial.cell, trial.seed), trial.seed
        path, file = self.folder / "runs" / run, self.folder / "scores" / f"{run}.json"
        return scoring.score_once(path, file, self.setting, training, seed, self.of(training))


def chosen_methods(
    names: Sequence[str], setting: Setting
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the methods to run, and those left out with the reason.

    Without `names`, all that are installed and accept the setting. The method that trains each
    client alone is always among them. Raises `OptionError` for an unknown name.
    """
    known = load_registry().methods
    for name in names:
        if name not in known:
            raise unknown("method", name, known, "bfl list method shows them")
        if name in LEFT_OUT:
            raise OptionError(f"method {name} {LEFT_OUT[name]}; leave it out")
    if names:
        return tuple(dict.fromkeys([*names, ALONE])), {}
    chosen, left_out = list[str](), dict[str, str]()
    for name in sorted({cls.name for cls in known.values()}):
        reason = LEFT_OUT.get(name) or _refused(setting, name)
        if reason:
            left_out[name] = reason
        else:
            chosen.append(name)
    ordered = [*[name for name in chosen if name not in APART], *filter(chosen.__contains__, APART)]
    return tuple(ordered), left_out


def _refused(setting: Setting, method: str) -> str:
    try:
        resolve_cells([cell_of(setting, CLEAN, method)])
    except BflError as error:
        return str(error)
    return ""


def _check_data(shift: Shift) -> None:
    """Raise `BflError`, with the way out, if the foreign samples of a shift are not there."""
    try:
        data_set(shift.foreign)
    except BflError as error:
        raise type(error)(
            f"shift {shift.name}: {error}; or leave it out: --shifts names the others"
        ) from None
