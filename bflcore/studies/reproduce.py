"""Reproducing a paper's table: run what is missing, and write ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import attrs

from bflcore.errors import OptionError
from bflcore.files import write_text
from bflcore.studies.cells import Cell, seeds_of
from bflcore.studies.evidence import Evidence, Measured, write_record
from bflcore.studies.execution import Standing, execute, resolve_cells
from bflcore.studies.outcome import Reproduction, check, compared
from bflcore.studies.paper_tables import Table, read_table, table_names
from bflcore.studies.plan import Planned, fetch, plan
from bflcore.studies.results import collect
from bflcore.studies.results_page import facts, page

__all__ = ["FOLDER", "reproduce", "standing_of_tables"]

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
    number of rounds, `paper` asks for the paper's. Runs that a record in `out` tells of are not
    repeated; others are kept in `runs` (default: below runs/reproduce) and continue where they
    stopped. The page is written whenever a run ends. With `download`, absent data are fetched
    first. With `pages`, nothing is run and the page is written again. Raises `BflError`.
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
    cells = {one.cell.name: one.cell for one in planner(patterns) if one.cell is not None}
    if cells:
        resolve_cells(list(cells.values()))
    words = ["bfl", "reproduce", found.name, *(["--paper"] if paper else [])]
    words += ["--rounds", str(rounds)] if rounds is not None else []
    study = _Study(found, planner(), chosen, Evidence.read(Path(out)), Path(out), " ".join(words))
    if not pages:
        place = Path(runs) if runs is not None else FOLDER / "runs"
        study.run([*cells.values()], place / found.protocol.name, jobs, progress)
    return study.write()


@attrs.define
class _Study:
    """A table with its planned cells, and what is known of their runs so far."""

    table: Table
    planned: Sequence[Planned]
    seeds: Sequence[int]
    known: Evidence
    out: Path
    command: str

    def run(
        self,
        cells: Sequence[Cell],
        folder: Path,
        jobs: int | None,
        progress: Callable[[Standing], None],
    ) -> None:
        """Run what is not known of the cells; after each run, write what is known."""
        for due, seeds in _batches(cells, self.seeds, self.known):
            ended = partial(self._show, progress, due, seeds, folder)
            done = execute(due, seeds, folder, jobs=jobs, progress=ended)
            self.known.add(done)

    def _show(
        self,
        progress: Callable[[Standing], None],
        cells: Sequence[Cell],
        seeds: Sequence[int],
        folder: Path,
        standing: Standing,
    ) -> None:
        """Report how far the runs are; the page shows what is finished, whatever happens next."""
        progress(standing)
        if standing.ended:
            ended = collect(cells, seeds, folder, {standing.ended: standing.reason})
            trials = [t for t in ended.trials if t.failure in {"", standing.reason}]
            self.known.add(attrs.evolve(ended, trials=tuple(trials)))
            self.write()

    def write(self) -> Reproduction:
        """Write ``TABLE.json`` and ``TABLE.md``, and return what they say."""
        name, found = self.table.name, self.gather()
        write_record(self.out / f"{name}.json", facts(found), found.runs)
        write_text(self.out / f"{name}.md", page(found))
        return found

    def gather(self) -> Reproduction:
        """Put what is known beside the paper's numbers."""
        table = self.table
        against = read_table(table.against) if table.against else None
        names = {one.cell.name for one in self.planned if one.cell}
        known = {r.trial.seed for r in self.known.runs.values() if r.trial.cell in names}
        seeds = sorted({*self.seeds, *known})
        cells, used = [], dict[str, Measured]()
        for one in self.planned:
            found = self.known.by_seed(_commands(one.cell, seeds))
            metric = one.column.metric
            values = {seed: run.value(metric.key, metric.statistic) for seed, run in found.items()}
            numbers = {seed: value for seed, value in values.items() if value is not None}
            used |= {found[seed].trial.command: found[seed] for seed in numbers}
            cells.append(compared(one, numbers, tuple(seeds), _other(against, one)))
        by_name = {(one.planned.row.name, one.planned.column.name): one for one in cells}
        claims = tuple(check(claim, table, by_name) for claim in table.claims)
        asked = {c for one in self.planned for c in _commands(one.cell, seeds).values()}
        failures = {c: reason for c, reason in self.known.failures.items() if c in asked}
        runs = tuple(used.values())
        return Reproduction(table, tuple(cells), claims, runs, failures, self.command)


def _batches(
    cells: Iterable[Cell], seeds: Sequence[int], known: Evidence
) -> list[tuple[list[Cell], list[int]]]:
    """Return the cells whose runs are not known, with the seeds that lack the same of them."""
    batches: dict[tuple[str, ...], list[int]] = {}
    listed = list(cells)
    for seed in seeds:
        names = tuple(cell.name for cell in listed if cell.command(seed) not in known.runs)
        batches.setdefault(names, []).append(seed)
    by_name = {cell.name: cell for cell in listed}
    return [([by_name[name] for name in names], found) for names, found in batches.items() if names]


def standing_of_tables() -> list[tuple[Table, int, int, list[str]]]:
    """Return each installed table with its runnable and all cells, and why others are not."""
    listed = []
    for name in table_names():
        table = read_table(name)
        planned = plan(table)
        here = sum(one.cell is not None for one in planned)
        reasons = dict.fromkeys(one.why.partition(";")[0] for one in planned if one.why)
        listed.append((table, here, len(planned), [*reasons]))
    return listed


def _seeds(table: Table, seeds: str | Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(seeds, str) or seeds is None:
        return seeds_of(seeds or table.protocol.seeds)
    return tuple(seeds)


def _commands(cell: Cell | None, seeds: Sequence[int]) -> dict[int, str]:
    return {seed: cell.command(seed) for seed in seeds} if cell else {}


def _other(against: Table | None, one: Planned) -> float | None:
    """Return what the other paper prints for the same method and column."""
    if against is None:
        return None
    rows = [row for row in against.rows if row.recipe.name == one.row.recipe.name]
    return rows[0].paper.get(one.column.name) if rows else None
