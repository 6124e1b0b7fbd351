"""The benchmark: train every method with every seed, then ask its clients about shifted samples."""

from __future__ import annotations

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
from bflcore.studies.execution import Standing, execute, resolve_cells
from bflcore.studies.results import Results, Trial, run_folder

__all__ = ["Benchmark", "Found", "chosen_methods", "told"]

Say = Callable[[str], None]


@attrs.frozen
class Found:
    """What the benchmark found: scores by training, method and seed, and the reasons for gaps.

    `trials` are the runs with their commands and seconds.
    """

    scores: Mapping[tuple[str, str, int], Scored]
    missing: tuple[tuple[str, str, int, str], ...]
    trials: tuple[Trial, ...]
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

    def execute(self, jobs: int | None, say: Say) -> Found:
        """Do what is not done yet, seed by seed, and return everything.

        Raises `BflError` before anything is written if a cell or a data set is not valid.
        """
        for shift in self.shifts:
            if shift.foreign:
                _check_data(shift)
        cells, runs = self.cells(), self.folder / "runs"
        resolve_cells(cells)
        parts = []
        scores: dict[tuple[str, str, int], Scored] = {}
        missing: list[tuple[str, str, int, str]] = []
        for seed in self.seeds:
            part = execute(cells, [seed], runs, jobs=jobs, progress=told(say, seed))
            parts.append(part)
            for trial in part.trials:
                training, method = named(trial.cell)
                reason = trial.failure or self._score(trial, scores)
                if reason:
                    missing.append((training, method, seed, reason))
            say(f"seed {seed}: scored")
        return _all(parts, scores, missing)

    def _score(self, trial: Trial, scores: dict[tuple[str, str, int], Scored]) -> str:
        """Add the scores of one run; return why it has none, or an empty text."""
        training, method = named(trial.cell)
        run, seed = run_folder(trial.cell, trial.seed), trial.seed
        path, file = self.folder / "runs" / run, self.folder / "scores" / f"{run}.json"
        shifts = self.of(training)
        try:
            found = scoring.score_once(path, file, self.setting, training, seed, shifts)
        except BflError as error:
            return str(error)
        scores[training, method, seed] = found
        return ""


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


def told(say: Say, seed: int) -> Callable[[Standing], None]:
    """Return what says, in one line, which run has ended and how many are left."""

    def tell(standing: Standing) -> None:
        if not standing.ended:
            return
        left = "" if standing.left is None else f", {standing.left / 60:.0f} min left"
        failed = f": {standing.reason}" if standing.reason else ""
        say(f"seed {seed}: {standing.done} of {standing.total}{left}  {standing.ended}{failed}")

    return tell


def _all(
    parts: Sequence[Results],
    scores: Mapping[tuple[str, str, int], Scored],
    missing: Sequence[tuple[str, str, int, str]],
) -> Found:
    """Join the results of all seeds."""
    versions: list[Mapping[str, Any]] = []
    for part in parts:
        versions += [one for one in part.versions if one not in versions]
    trials = tuple(trial for part in parts for trial in part.trials)
    return Found(scores, tuple(missing), trials, tuple(versions), parts[0].machine)
