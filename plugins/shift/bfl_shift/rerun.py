"""Running a part of a table again: are the scores equal to the bit?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from bfl_shift.scoring import digest, score
from bfl_shift.settings import SETTINGS, Setting, cell_of
from bfl_shift.shifts import Shift, shifts_of
from bfl_shift.table import Table
from bflcore.errors import OptionError
from bflcore.experiments.integrity import digest_of
from bflcore.studies.execution import Progress, Standing, execute
from bflcore.studies.results import run_folder

__all__ = ["Check", "rerun", "sample"]

Run = tuple[str, str, int]  # training, method, seed


@attrs.frozen
class Check:
    """How many runs were repeated, how many records they have, and those that differ."""

    runs: int
    records: int
    differing: tuple[str, ...]


def rerun(
    table: Table,
    fraction: float,
    jobs: int | None,
    progress: Progress,
    say: Callable[[str], None],
) -> Check:
    """Train a fraction of the runs of a table again, and compare all their records.

    `progress` is called when a training begins or ends; `say` gets a line for each run. Raises
    `OptionError` for another fraction than above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise OptionError(f"--check: {fraction:g} is not allowed; allowed: above 0, at most 1")
    setting = SETTINGS[table.setting]
    shifts = {name: s for name, s in shifts_of(setting).items() if name in table.shifts}
    chosen = sample(table, tuple(shifts.values()), fraction)
    known = {(r.method, r.shift, r.seed): r.digest for r in table.records}
    records, differing, done = 0, list[str](), 0
    for seed in sorted({run[-1] for run in chosen}):
        some = [run for run in chosen if run[-1] == seed]
        tell = partial(_tell, progress, done, len(chosen))
        done += len(some)
        for (training, method, _), found in _again(setting, some, shifts, jobs, tell):
            differs = [name for name in found if found[name] != known[method, name, seed]]
            differing += [f"{method}, {name}, seed {seed}" for name in differs]
            records += len(found)
            said = f"differs in {', '.join(differs)}" if differs else "equal"
            say(f"{training}, {method}, seed {seed}: {said}")
    return Check(len(chosen), records, tuple(differing))


def sample(table: Table, shifts: Sequence[Shift], fraction: float) -> list[Run]:
    """Return a fraction of the runs of a table, rounded up; always the same of equal tables."""
    training = {shift.name: shift.training for shift in shifts}
    runs = {(training[r.shift], r.method, r.seed) for r in table.records}
    order = sorted(runs, key=lambda run: digest_of(list(run)))
    return sorted(order[: math.ceil(fraction * len(order))])


def _tell(progress: Progress, before: int, total: int, at: Standing) -> None:
    """Say how far all runs are; `before` this seed's, some have ended."""
    done, left = before + at.done, at.total - at.done
    seconds = at.left * (total - done) / left if at.left and left else None
    progress(attrs.evolve(at, done=done, total=total, left=seconds))


def _again(
    setting: Setting,
    runs: Sequence[Run],
    shifts: Mapping[str, Shift],
    jobs: int | None,
    progress: Progress,
) -> Iterator[tuple[Run, dict[str, str]]]:
    """Train runs of one seed again; yield the digest of their scores by shift, "" if one failed."""
    cells, seed = [cell_of(setting, *run[:2]) for run in runs], runs[0][-1]
    with TemporaryDirectory(prefix="bfl-shift-") as folder:
        trials = execute(cells, [seed], Path(folder), jobs=jobs, progress=progress).trials
        for run, trial in zip(runs, trials, strict=True):
            tested = [shift for shift in shifts.values() if shift.training == run[0]]
            found = dict.fromkeys((shift.name for shift in tested), "")
            if not trial.failure:
                path = Path(folder) / run_folder(trial.cell, seed)
                scores = score(path, setting, run[0], seed, tested)
                found = {name: digest(one) for name, one in scores.items()}
            yield run, found
