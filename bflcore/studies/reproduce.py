"""Reproducing a paper's table: run what is missing, and write ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

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
    progress: Callable[[Standing], None] = lambda _: None,
) -> Reproduction:
    """Run what is missing of a table, write its page and record, and return it.

    `table` is a name (see ``bfl reproduce``) or a file ``.toml``; `only` selects rows and columns;
    `seeds` are numbers or a text such as ``0-4`` (default: the table's). `rounds` overrides the
    number of rounds, `paper` asks for the paper's. Runs that a record in `out` tells of are not
    repeated; others are kept in `runs` (default: below runs/reproduce) and continue where they
    stopped. The page is written whenever a run ends. With `download`, absent data are fetched
    first. Raises `BflError`.
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
    selected, every = planner(patterns), planner()
    cells = {one.cell.name: one.cell for one in selected if one.cell is not None}
    if cells:
        resolve_cells(list(cells.values()))
    target = Path(out)
    known = Evidence.read(target)
    failures: dict[str, str] = {}
    everything = sorted({*chosen, *_known_seeds(every, known)})
    command = _command(found, patterns, seeds)

    def record() -> Reproduction:
        result = _gather(found, every, known, everything, failures, command)
        _write(result, target)
        return result

    for due, due_seeds in _batches(cells.values(), chosen, known):
        place = (Path(runs) if runs is not None else FOLDER / "runs") / found.protocol.name

        def ended(standing: Standing, due: Sequence[Cell] = due, place: Path = place) -> None:
            progress(standing)
            if standing.ended and not standing.reason:
                known.add(collect(due, chosen, place, {}))
                record()  # a page shows what is finished, whatever happens next

        done = execute(due, due_seeds, place, jobs=jobs, progress=ended)
        known.add(done)
        failures |= {trial.command: trial.failure for trial in done.failures}
    return record()


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


def _write(found: Reproduction, folder: Path) -> None:
    """Write ``TABLE.json`` and ``TABLE.md`` to a folder."""
    name = found.table.name
    write_record(folder / f"{name}.json", facts(found), found.runs)
    write_text(folder / f"{name}.md", page(found))


def _seeds(table: Table, seeds: str | Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(seeds, str) or seeds is None:
        return seeds_of(seeds or table.protocol.seeds)
    return tuple(seeds)


def _known_seeds(planned: Sequence[Planned], known: Evidence) -> set[int]:
    """Return the seeds of all runs that are known of a table's cells."""
    names = {one.cell.name for one in planned if one.cell}
    return {run.trial.seed for run in known.runs.values() if run.trial.cell in names}


def _gather(
    table: Table,
    planned: Sequence[Planned],
    known: Evidence,
    seeds: Sequence[int],
    failures: Mapping[str, str],
    command: str,
) -> Reproduction:
    """Put what is known beside the paper's numbers."""
    against = read_table(table.against) if table.against else None
    cells, used = [], dict[str, Measured]()
    for one in planned:
        found = known.by_seed(_commands(one.cell, seeds))
        metric = one.column.metric
        values = {seed: run.value(metric.key, metric.statistic) for seed, run in found.items()}
        numbers = {seed: value for seed, value in values.items() if value is not None}
        used |= {found[seed].trial.command: found[seed] for seed in numbers}
        cells.append(compared(one, numbers, tuple(seeds), _other(against, one)))
    by_name = {(one.planned.row.name, one.planned.column.name): one for one in cells}
    claims = tuple(check(claim, table, by_name) for claim in table.claims)
    return Reproduction(table, tuple(cells), claims, tuple(used.values()), dict(failures), command)


def _commands(cell: Cell | None, seeds: Sequence[int]) -> dict[int, str]:
    return {seed: cell.command(seed) for seed in seeds} if cell else {}


def _other(against: Table | None, one: Planned) -> float | None:
    """Return what the other paper prints for the same method and column."""
    if against is None:
        return None
    rows = [row for row in against.rows if row.recipe.name == one.row.recipe.name]
    return rows[0].paper.get(one.column.name) if rows else None


def _command(table: Table, only: Sequence[str], seeds: str | Sequence[int] | None) -> str:
    words = ["bfl", "reproduce", table.name]
    words += [word for pattern in only for word in ("--only", pattern)]
    if seeds is not None:
        words += ["--seeds", seeds if isinstance(seeds, str) else ",".join(map(str, seeds))]
    return " ".join(words)
