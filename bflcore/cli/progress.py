"""What a run prints: a header, live progress (a bar on a terminal, else lines), final metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

    from bflcore.experiments.prepare import Prepared
    from bflcore.experiments.records import Record
    from bflcore.experiments.resolve import Experiment
    from bflcore.experiments.run import Progress

__all__ = ["print_final", "print_header", "show_progress"]

LONGEST_REASON = 500  # characters of what a client says

SHOWN = ("accuracy", "ece", "rmse")  # while running; means over clients
SHORT = {"accuracy": "accuracy", "ece": "ECE", "rmse": "RMSE", "nll": "NLL"}  # two fit on a bar
WIDTHS = {"metrics": 27, "time": 7, "bar": 5}  # columns of a terminal that a bar needs at least


def print_header(prepared: Prepared, path: Path) -> None:
    """Say what is about to run: method, data, clients, parameters, processes, folder."""
    experiment, problem = prepared.experiment, prepared.problem
    known = prepared.description.clients
    train, test = (sum(getattr(one, kind) for one in known) for kind in ("train", "test"))
    data = experiment.data
    click.echo(
        f"{experiment.method} on {data.data}: {len(known)} clients ({data.partition}), "
        f"{train} training and {test} test samples, {problem.layout.total} parameters",
        err=True,
    )
    rounds = experiment.run.rounds
    where = experiment.engine.workplace(problem, experiment.inference)
    notes = [f"{rounds} round{'s' if rounds > 1 else ''}", where]
    sampled, everybody = experiment.run.eval_clients, max(len(problem.clients), len(problem.novel))
    if sampled and sampled < everybody:
        notes.append(
            f"evaluated on a sample of {sampled:,} of {len(known):,} clients until the last"
        )
    if problem.foreign is not None:
        notes.append(f"{len(problem.foreign)} samples of {prepared.foreign} as --ood")
    click.echo(f"{', '.join(notes)}; results in {path}", err=True)


def print_final(path: Path) -> None:
    """Print a finished run's final metrics, and a linear predictor's coefficients."""
    from bflcore.experiments.coefficients import FILE, read_coefficients
    from bflcore.report.coefficients import rows_of
    from bflcore.report.reading import read_run
    from bflcore.report.table import MEANING, final_rows, print_table

    run = read_run(path)
    if (path / FILE).is_file():
        print_table(rows_of(read_coefficients(path)))
        click.echo("Coefficients in the units of the data, with 95 % credible intervals.")
    if rows := final_rows(run):
        print_table(rows)
        click.echo(f"{MEANING['mean']}\n{MEANING['pooled']}")
    if (worst := run.worst) and len(run.tested) > 1:
        metric = "accuracy" if run.classifies else "rmse"
        click.echo(
            f"Worst client: {run.client(worst['client'])}, {SHORT[metric]} {worst[metric]:.4f} on "
            f"{worst['examples']} test samples."
        )


@contextmanager
def show_progress(experiment: Experiment, quiet: bool, done: int = 0) -> Iterator[Progress]:
    """Yield a callback that shows each round; `done` rounds were completed earlier."""
    if quiet:
        yield lambda *_: None
    elif sys.stderr.isatty():
        with _bar(experiment, done) as progress:
            yield progress
    else:
        yield _lines(experiment, done)


@contextmanager
def _bar(experiment: Experiment, done: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console, total = Console(stderr=True), experiment.run.rounds
    counted = 2 * len(str(total)) + 1
    room = console.width - sum(WIDTHS.values()) - counted - 4  # a space between columns
    columns = (
        TextColumn("[bold]{task.description}"),
        MofNCompleteColumn(),
        BarColumn(None, table_column=Column(ratio=1, min_width=WIDTHS["bar"])),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, expand=True) as bar:
        name = experiment.method[: max(3, room)]
        task = bar.add_task(name, total=total, metrics="", completed=done)
        if experiment.run.pretrain and not done:
            bar.console.print(_pretraining(experiment))
        latest = ""

        def progress(number: int, loss: float, record: Record | None) -> None:
            nonlocal latest
            if record is not None:
                latest = _two(record)
                for failure in record["dropped"]:
                    # A client's text is not read as markup.
                    bar.console.print(_drop(failure), style="yellow", markup=False, highlight=False)
            bar.update(task, completed=number, metrics=latest or f"loss {loss:.3f}")

        yield progress


def _lines(experiment: Experiment, done: int) -> Progress:
    began = time.perf_counter()
    total = experiment.run.rounds
    if experiment.run.pretrain and not done:
        click.echo(_pretraining(experiment), err=True)

    def progress(number: int, loss: float, record: Record | None) -> None:
        nonlocal began
        if number == 0:
            began = time.perf_counter()
        if record is None:
            return
        for failure in record["dropped"]:
            click.echo(_drop(failure), err=True)
        left = ""
        if number > done:
            seconds = (time.perf_counter() - began) / (number - done) * (total - number)
            left = f"  {seconds:.0f} s left"
        click.echo(
            f"round {number}/{total}  loss {loss:.3f}  {_metrics(record)}{left}",
            err=True,
        )

    return progress


def _pretraining(experiment: Experiment) -> str:
    share = f"{100 * experiment.run.pretrain:.3g} %"
    return f"pre-training on {share} of the training samples (reported as round 0)"


def _metrics(record: Record) -> str:
    parts = []
    for group in ("personal", "global", "validation"):
        for name in SHOWN:
            found = record.get(f"{group}.{name}")
            if found is not None:
                parts.append(f"{group}.{name} {found['mean']:.4f}")
    return "  ".join(parts)


def _two(record: Record) -> str:
    """Return two metrics of the clients' own models, which fit wherever a bar fits."""
    found = [(text, record.get(f"personal.{name}")) for name, text in SHORT.items()]
    parts = [f"{text} {metric['mean']:.4g}" for text, metric in found if metric is not None]
    return " ".join(parts[:2])[: WIDTHS["metrics"]]


def _drop(failure: Record) -> str:
    client = failure.get("id", failure["client"])
    reason = "".join(c if c.isprintable() else " " for c in str(failure["reason"]))
    more = " ..." if len(reason) > LONGEST_REASON else ""
    return f"round {failure['round']}: client {client} dropped: {reason[:LONGEST_REASON]}{more}"
