"""``bfl sweep``: methods times a grid of settings times seeds."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bflcore.cli.execution import interruptible
from bflcore.cli.run import QUIET, experiment_flags
from bflcore.errors import BflError, OptionError
from bflcore.studies.cells import Cell, seeds_of
from bflcore.studies.execution import duration, execute
from bflcore.studies.grids import cells_of, parse_axis, read_list
from bflcore.studies.results import read_study
from bflcore.studies.sweeps import check_choice, check_names, default_folder, write_tables

if TYPE_CHECKING:
    from bflcore.studies.execution import Progress, Standing
    from bflcore.studies.results import Results

__all__ = ["commands", "show_standing"]

SEEDS = "0-4"


@click.command("sweep", context_settings={"max_content_width": 100})
@partial(experiment_flags, required=False)
@click.option("--seeds", metavar="LIST", help=f"seeds, such as 0-4 or 0,2,5-7 [default: {SEEDS}]")
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B",
    help="values of a flag or of PART.OPTION (repeatable: all combinations are run); values that "
    "have commas are separated by semicolons: 'partition=iid;dirichlet:0.5'",
)
@click.option(
    "--list",
    "listed",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="a TOML file with tables [[cell]] of flags and options, each combined with the grid",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="folder of the sweep [default: a new folder under runs/]",
)
@click.option("--jobs", type=int, metavar="N", help="runs at a time [default: one per core]")
@click.option("--resume", type=click.Path(path_type=Path), help="folder of a sweep to continue")
@click.option("--metric", metavar="NAMES", help="metrics of the table, such as personal.accuracy")
@click.option("--select", metavar="METRIC", help="metric by which the best cell is named")
@click.option(
    "--on",
    metavar="SAMPLES",
    help="samples for --select: validation, or test (which says that it chose on test data) "
    "[default: validation]",
)
@QUIET
@click.option("--json", "as_json", is_flag=True, help="print results.json at the end")
def sweep(
    method: str | None,
    options: tuple[str, ...],
    seeds: str | None,
    grid: tuple[str, ...],
    listed: Path | None,
    out: Path | None,
    jobs: int | None,
    resume: Path | None,
    metric: str | None,
    select: str | None,
    on: str | None,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Run METHOD, or several (bpfed,fedavg), with every value of a grid and every seed.

    All other flags are those of bfl run, and hold for all runs. A sweep that was interrupted
    continues with the same command, or with --resume.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    if resume is not None:
        words = {"METHOD": method, "--seeds": seeds, "--grid": grid, "--list": listed, "--out": out}
        _check_alone({**words, "-o": options, **{f"--{n.replace('_', '-')}": 1 for n in flags}})
        cells, numbers = read_study(resume)
    else:
        cells = _cells(method, flags, options, grid, listed)
        numbers = seeds_of(seeds or SEEDS)
    folder = resume or out or default_folder(cells)
    metrics = _words(metric)
    if select:
        check_choice(cells, select, on or "validation")
    elif on:
        raise OptionError("--on says what --select chooses on; add --select, or leave out --on")
    on = on or "validation"
    check = partial(check_names, metrics, select, on) if metrics or select else None
    silent = quiet or as_json
    again = f"bfl sweep --resume {shlex.quote(str(folder))}"
    with (
        interruptible(lambda: f"interrupted. Continue with: {again}"),
        show_standing(folder, silent) as progress,
    ):
        results = execute(cells, numbers, folder, jobs=jobs, progress=progress, check=check)
    told = _report(results, metrics, select, on, quiet=quiet, as_json=as_json)
    return 0 if told and not results.failures else 1


def _check_alone(given: Mapping[str, Any]) -> None:
    """Raise `OptionError` if anything is given beside ``--resume``."""
    for flag, value in given.items():
        if value:
            raise OptionError(
                f"--resume: the sweep knows its settings; leave out {flag}, or give the whole "
                "command again with --out"
            )


def _cells(
    method: str | None,
    flags: Mapping[str, Any],
    options: Sequence[str],
    grid: Sequence[str],
    listed: Path | None,
) -> tuple[Cell, ...]:
    if "seed" in flags:
        raise OptionError("--seed: a sweep has several; use --seeds")
    texts = dict(_assignment(text) for text in options)
    entries = read_list(listed) if listed else []
    return tuple(cells_of(_words(method), [*map(parse_axis, grid)], flags, texts, entries))


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise OptionError(
            f"-o: {text!r} is not allowed; allowed: PART.OPTION=VALUE, for example "
            "-o inference.lr=0.01"
        )
    return key, value


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _report(
    results: Results,
    metrics: Sequence[str],
    select: str | None,
    on: str,
    *,
    quiet: bool,
    as_json: bool,
) -> bool:
    """Write the tables; print results, failures and the choice. Return False if one is missing."""
    from bflcore.report.table import print_table
    from bflcore.studies.tables import MEANING, overview
    from bflcore.studies.versions import differing

    if said := differing(results.versions):
        click.echo(f"warning: {said}", err=True)
    for trial in results.failures:
        click.echo(f"failed: {trial.cell}/seed-{trial.seed}: {trial.failure}", err=True)
    told = True
    try:
        names = write_tables(results, metrics)
        choice = results.best(select, on) if select and names else None
    except BflError as error:  # the runs are finished, whatever is asked of them
        click.echo(str(error), err=True)
        names, choice, told = write_tables(results), None, False
    if as_json:
        best = {"best": choice.as_json()} if choice else {}
        click.echo(json.dumps(results.as_json() | best, indent=2))
    elif not quiet:
        if names:
            print_table(overview(results, names))
            click.echo(MEANING)
        if choice:
            click.echo(str(choice))
        click.echo(f"folder: {results.folder}")
        if names:
            click.echo("written: results.json, table.md, table.csv, plot.svg")
    return told


@contextmanager
def show_standing(folder: Path, silent: bool) -> Iterator[Progress]:
    """Yield a callback that shows how far a sweep is: a bar on a terminal, else lines."""
    if silent:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar() as progress:
            yield progress
    else:
        yield partial(_print_line, folder)


def _print_line(folder: Path, at: Standing) -> None:
    if text := at.line(folder):
        click.echo(text, err=True)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text

    columns = (
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn(
            "{task.fields[running]}", markup=False, table_column=Column(ratio=1, no_wrap=True)
        ),
    )
    with Bar(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task("", total=None, left="", running="")

        def progress(at: Standing) -> None:
            if at.reason:
                bar.console.print(Text(f"{at.ended} failed: {at.reason}"), style="yellow")
            left = f"{duration(at.left)} left" if at.left else ""
            running = ", ".join(at.running)
            bar.update(task, completed=at.done, total=at.total, left=left, running=running)

        yield progress


commands = (sweep,)
