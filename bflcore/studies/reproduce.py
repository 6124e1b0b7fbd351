"""Reproducing a paper's table: run what is missing, and write ours beside the paper's."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs

from bflcore.errors import OptionError
from bflcore.files import write_text
from bflcore.studies.cells import Cell, seeds_of
from bflcore.studies.evidence import (
    Evidence,
    Measured,
    plain_command,
    settings_digest,
    stored_digest,
    writing_record,
)
from bflcore.studies.execution import Standing, execute, settings_of
from bflcore.studies.outcome import Reproduction, check, compared
from bflcore.studies.paper_tables import Table, read_table, table_names
from bflcore.studies.plan import Planned, base_command, fetch, plan
from bflcore.studies.results import collect
from bflcore.studies.results_page import facts, page

__all__ = ["FOLDER", "Available", "available_tables", "reproduce"]

FOLDER = Path("runs", "reproduce")


def reproduce(
    table: str | Path,
    only: str | Sequence[str] = (),
    *,
    seeds: str | Sequence[int] | None = None,
    rounds: int | None = None,
    paper: bool = False,
    jobs: int | None = None,
    out: Path | str = FOLDER,
    runs: Path | str | None = None,
    data_dir: Path | str | None = None,
    download: bool = False,
    pages: bool = False,
    progress: Callable[[Standing], None] = lambda _: None,
) -> Reproduction:
    """Run what is missing of a table, write its page and record, and return it.

    `table` is a name (see ``bfl reproduce``) or a file ``.toml``; `only` selects rows and columns;
    `seeds` are numbers or a text such as ``0-4`` (default: the table's). `rounds` overrides the
    number of rounds, `paper` asks for the paper's. Runs that a record in `out` tells of, with the
    settings of today, are not repeated; others are kept in `runs` (default: below runs/reproduce)
    and continue where they stopped. The page is written whenever a run ends; the record keeps the
    runs of other settings that it has. With `download`, absent data are fetched first. With
    `pages`, nothing is run and the page is written again. Raises `BflError`.
    """
    found = read_table(table)
    patterns = [only] if isinstance(only, str) else list(only)
    patterns = [word for text in patterns for word in text.split(",") if word]
    if paper and rounds is not None:
        raise OptionError("--paper and --rounds exclude each other; give one of them")
    chosen = _seeds(found, seeds)
    folder = Path(data_dir) if data_dir is not None else None
    planner = partial(plan, found, rounds=rounds, paper=paper, data_dir=folder)
    if download:
        fetch(planner(patterns), found, folder)
    planned, selected = planner(), planner(patterns)
    base = base_command(found, rounds, folder, paper=paper)
    words = [word for pattern in patterns for word in ("--only", pattern)]
    if seeds is not None:
        words += ["--seeds", seeds if isinstance(seeds, str) else ",".join(map(str, seeds))]
    command = f"{base} {shlex.join(words)}".rstrip()
    known = Evidence.read(Path(out))
    study = _Study(found, planned, chosen, known, Path(out), command, base)
    place = (Path(runs) if runs is not None else FOLDER / "runs") / found.protocol.name
    study.take_over(place)
    if not pages:
        study.run([*_cells(selected)], place, jobs, progress)
    return study.write()


def _cells(planned: Iterable[Planned]) -> list[Cell]:
    """Return the different cells."""
    return [*{one.cell.name: one.cell for one in planned if one.cell is not None}.values()]


@attrs.define
class _Study:
    """A table with its planned cells, and what is known of their runs so far."""

    table: Table
    planned: Sequence[Planned]
    seeds: Sequence[int]
    known: Evidence
    out: Path
    command: str
    base: str
    digests: Mapping[str, str] = attrs.field(init=False)  # of the settings, by cell
    metrics: Mapping[str, set[tuple[str, str]]] = attrs.field(init=False)  # shown, by cell

    def __attrs_post_init__(self) -> None:
        """Resolve the settings of all cells. Raises `BflError` for one that is not valid."""
        cells = _cells(self.planned)
        settings = settings_of(cells) if cells else {}
        self.digests = {name: settings_digest(values) for name, values in settings.items()}
        self.metrics = {cell.name: set() for cell in cells}
        for one in self.planned:
            if one.cell is not None:
                metric = one.column.metric
                self.metrics[one.cell.name].add((metric.key, metric.statistic))

    def take_over(self, folder: Path) -> None:
        """Add the finished runs in a folder that were made with the settings of today."""
        for cell in _cells(self.planned):
            if stored_digest(folder / cell.name) == self.digests[cell.name]:
                ended = (folder / cell.name).glob("seed-*/summary.json")
                numbers = [path.parent.name.removeprefix("seed-") for path in ended]
                seeds = sorted(int(number) for number in numbers if number.isdigit())
                due = [seed for seed in seeds if not self._has_digest(cell, seed)]
                found = collect([cell], due, folder, {})
                done = tuple(trial for trial in found.trials if not trial.failure)
                self.known.add(attrs.evolve(found, trials=done))

    def _has_digest(self, cell: Cell, seed: int) -> bool:
        found = self.find(cell, seed)
        return found is not None and found.settings != ""

    def find(self, cell: Cell, seed: int) -> Measured | None:
        """Return a finished run of a cell, with its settings of today, if it is known."""
        return self.known.find(cell.command(seed), self.digests[cell.name])

    def run(
        self,
        cells: Sequence[Cell],
        folder: Path,
        jobs: int | None,
        progress: Callable[[Standing], None],
    ) -> None:
        """Run what is not known of the cells; after each run, write what is known."""
        batches = self._batches(cells)
        whole = _Whole(progress, sum(len(due) * len(seeds) for due, seeds in batches))
        for due, seeds in batches:
            ended = partial(self._show, whole.show, {cell.name: cell for cell in due}, folder)
            self.known.add(execute(due, seeds, folder, jobs=jobs, progress=ended))
            whole.before, whole.failed_before = whole.done, whole.failed

    def _batches(self, cells: Sequence[Cell]) -> list[tuple[list[Cell], list[int]]]:
        """Return the cells whose runs are not known, with the seeds that lack the same of them.

        A run is known if it has the metrics that the table shows of it.
        """
        batches: dict[tuple[str, ...], list[int]] = {}
        for seed in self.seeds:
            names = tuple(cell.name for cell in cells if not self._is_known(cell, seed))
            batches.setdefault(names, []).append(seed)
        by_name = {cell.name: cell for cell in cells}
        return [
            ([by_name[name] for name in names], found) for names, found in batches.items() if names
        ]

    def _is_known(self, cell: Cell, seed: int) -> bool:
        found = self.find(cell, seed)
        shown = self.metrics[cell.name]
        return found is not None and all(found.value(*metric) is not None for metric in shown)

    def _show(
        self,
        progress: Callable[[Standing], None],
        cells: Mapping[str, Cell],
        folder: Path,
        standing: Standing,
    ) -> None:
        """Report how far the runs are; the page shows what is finished, whatever happens next."""
        progress(standing)
        if standing.ended:
            name, _, seed = standing.ended.rpartition("/seed-")
            failures = {standing.ended: standing.reason}
            self.known.add(collect([cells[name]], [int(seed)], folder, failures))
            self.write()

    def write(self) -> Reproduction:
        """Write ``TABLE.json`` and ``TABLE.md``, and return what they say.

        The record keeps what it had, also from another process since it was read.
        """
        path = self.out / f"{self.table.name}.json"
        with writing_record(path) as record:
            self.known.update(record)
            found = self.gather()
            for run in found.runs:
                record.put(run)
            for command, reason in found.failures.items():
                record.fail(command, reason)
            found = attrs.evolve(found, kept=len([*record]) - len(found.runs))
            record.write(path, facts(found))
            write_text(path.with_suffix(".md"), page(found))
        return found

    def gather(self) -> Reproduction:
        """Put what is known beside the paper's numbers."""
        table = self.table
        against = read_table(table.against) if table.against else None
        known = {run.trial.seed for run in self.known if run.trial.cell in self.digests}
        seeds = sorted({*self.seeds, *known})
        cells, used = [], dict[str, Measured]()
        for one in self.planned:
            found = {seed: self.find(one.cell, seed) for seed in seeds} if one.cell else {}
            runs = {seed: run for seed, run in found.items() if run is not None}
            used |= {run.trial.command: run for run in runs.values()}
            metric = one.column.metric
            values = {seed: run.value(metric.key, metric.statistic) for seed, run in runs.items()}
            numbers = {seed: value for seed, value in values.items() if value is not None}
            cells.append(compared(one, numbers, tuple(seeds), _other(against, one)))
        by_name = {(one.planned.row.name, one.planned.column.name): one for one in cells}
        claims = tuple(check(claim, table, by_name) for claim in table.claims)
        planned = _cells(self.planned)
        asked = {plain_command(cell.command(seed)) for cell in planned for seed in seeds}
        failures = {c: reason for c, reason in self.known.failures.items() if c in asked}
        done = tuple(used.values())
        return Reproduction(table, tuple(cells), claims, done, failures, self.command, self.base)


@attrs.define
class _Whole:
    """How far all batches of runs are together, told as if they were one study."""

    progress: Callable[[Standing], None]
    total: int
    done: int = 0
    failed: int = 0
    before: int = 0  # done in earlier batches
    failed_before: int = 0
    ended: int = 0
    began: float = attrs.field(factory=time.monotonic)

    def show(self, at: Standing) -> None:
        """Tell how far all are, given how far the present batch is."""
        begins = not at.running and not at.ended
        self.done, self.failed = self.before + at.done, self.failed_before + at.failed
        self.ended += bool(at.ended)
        each = (time.monotonic() - self.began) / self.ended if self.ended else None
        left = None if each is None else each * (self.total - self.done)
        if not (begins and self.before):
            counts = self.done, self.total, self.failed
            self.progress(Standing(*counts, at.running, left, at.ended, at.reason))


@attrs.frozen
class Available:
    """How many of a table's cells can be run here, and how many of these on stand-in data.

    `reasons` names each data set and method that is absent, with the next step.
    """

    table: Table
    here: int
    stand_ins: int
    cells: int
    reasons: tuple[str, ...]


def available_tables() -> list[Available]:
    """Return what can be run here of each installed table."""
    listed = []
    for name in table_names():
        table = read_table(name)
        planned = plan(table)
        reasons: dict[str, str] = {}
        for one in planned:
            if one.why:
                reasons.setdefault(one.why.partition(";")[0], one.why)
        here = sum(one.cell is not None for one in planned)
        stand_ins = sum(bool(one.stand_in) for one in planned)
        listed.append(Available(table, here, stand_ins, len(planned), (*reasons.values(),)))
    return listed


def _seeds(table: Table, seeds: str | Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(seeds, str) or seeds is None:
        return seeds_of(seeds or table.protocol.seeds)
    return tuple(seeds)


def _other(against: Table | None, one: Planned) -> float | None:
    """Return what the other paper prints for the same method and column."""
    if against is None:
        return None
    rows = [row for row in against.rows if row.recipe.name == one.row.recipe.name]
    return rows[0].paper.get(one.column.name) if rows else None
