"""Sweeps: methods times the values of a grid times seeds, with a table and a picture."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.errors import OptionError
from bflcore.files import write_text
from bflcore.lazy import lazy
from bflcore.studies.cells import Cell, seeds_of
from bflcore.studies.execution import Progress, Standing, execute, resolve_cells
from bflcore.studies.grids import Entry, axis_of, cells_of
from bflcore.studies.metrics import check_metric, chosen_on, shown
from bflcore.studies.results import Results

if TYPE_CHECKING:
    from bflcore.studies import plots, tables
else:
    plots = lazy("bflcore.studies.plots")  # importing matplotlib takes half a second
    tables = lazy("bflcore.studies.tables")

__all__ = ["check_choice", "check_names", "default_folder", "sweep", "write_tables"]


def sweep(
    methods: str | Sequence[str],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: Iterable[int] | str = range(5),
    out: Path | str | None = None,
    jobs: int | None = None,
    options: Mapping[str, object] | None = None,
    entries: Sequence[Entry] = (),
    progress: bool | Progress = False,
    **flags: Any,
) -> Results:
    """Run every combination of methods, values of a `grid` and `seeds`; return the results.

    `grid` maps flags and options to values: ``{"inference.kl_weight": [0.1, 1], "cohort": [5]}``.
    `flags` and `options` are those of `bflcore.run`, for all runs. What is finished in the folder
    `out` (default: a new one under runs/) is kept, so the same call continues a sweep that was
    interrupted. `jobs` runs are executed at a time (default: one per core). `progress` prints a
    line per run, or is called with a `Standing` when a run begins or ends.

    The results choose (`Results.best`), compare (`Results.compare`), and become a data frame
    (`Results.frame`). Raises `BflError` for a mistake, before anything is run.
    """
    names = [methods] if isinstance(methods, str) else list(methods)
    axes = [axis_of(key, values) for key, values in (grid or {}).items()]
    cells = cells_of(names, axes, flags, options or {}, entries)
    numbers = seeds_of(seeds) if isinstance(seeds, str) else _checked(seeds)
    folder = Path(out) if out else default_folder(cells)
    report = progress if callable(progress) else partial(_print, folder if progress else None)
    results = execute(cells, numbers, folder, jobs=jobs, progress=report)
    write_tables(results)
    return results


def _print(folder: Path | None, at: Standing) -> None:
    if folder and (text := at.line(folder)):
        sys.stdout.write(f"{text}\n")


def _checked(seeds: Iterable[int]) -> tuple[int, ...]:
    found = tuple(seeds)
    for seed in found:
        if type(seed) is not int or seed < 0:
            raise OptionError(f"seeds: {seed!r} is not allowed; allowed: whole numbers from 0")
    if len(set(found)) < len(found):
        raise OptionError("seeds: a seed is given twice; give each once")
    return found


def check_choice(cells: Sequence[Cell], metric: str, on: str) -> None:
    """Raise `BflError` if the best of these cells could not be chosen by a metric."""
    chosen_on(metric, on)
    if on == "test":
        return
    for name, experiment in resolve_cells(cells).items():
        if not experiment.data.validation_fraction:
            raise OptionError(
                f"--select: cell {name} holds no samples out for validation; add "
                "--validation-fraction 0.2 (or --on test, which says that it chose on test data)"
            )


def check_names(metrics: Sequence[str], select: str | None, on: str, known: set[str]) -> None:
    """Raise `OptionError` unless runs record (`known`) what is shown, and what is chosen by."""
    for name in metrics:
        check_metric(name, known)
    if select:
        check_metric(chosen_on(select, on), known, "--select")


def default_folder(cells: Sequence[Cell], root: Path = Path("runs")) -> Path:
    """Return a folder that does not exist yet: ``runs/sweep-bpfed-fedavg``, ``...-2``, ..."""
    methods = dict.fromkeys(Path(cell.method).stem for cell in cells)
    stem = re.sub(r"[^A-Za-z0-9-]", "-", "-".join(["sweep", *methods]))[:80]
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(root / name for name in names if not (root / name).exists())


def write_tables(results: Results, metrics: Sequence[str] = ()) -> tuple[str, ...]:
    """Write ``table.md``, ``table.csv`` and ``plot.svg``; return the metrics that they show.

    `metrics`: those of the table and the picture. Without a finished run nothing is written.
    Raises `OptionError` if no run has one of them.
    """
    known = {name for trial in results.trials for name in trial.metrics}
    folder = results.folder
    if not known or folder is None:
        return ()
    names = tuple(check_metric(name, known) for name in metrics) or shown(known)
    shown_rows = tables.overview(results, names)
    write_text(folder / "table.md", tables.formatted(shown_rows, "markdown", tables.MEANING))
    write_text(folder / "table.csv", tables.csv_text(tables.result_rows(results)))
    write_text(folder / "plot.svg", plots.plot(results, names[:3]) + "\n")
    return names
