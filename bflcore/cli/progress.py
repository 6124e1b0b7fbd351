"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bflcore.experiments.records import Record
    from bflcore.experiments.resolve import Experiment
    from bflcore.experiments.run import Progress

__all__ = ["show_progress"]

SHOWN = ("accuracy", "ece", "rmse")  # while running


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

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(
            experiment.method, total=experiment.run.rounds, metrics="", completed=done
        )
        if experiment.run.pretrain and not done:
            bar.console.print(_pretraining(experiment))
        latest = ""

        def progress(number: int, loss: float, record: Record | None) -> None:
            nonlocal latest
            if record is not None:
                latest = _metrics(record)
                for failure in record["dropped"]:
                    bar.console.print(_drop(failure), style="yellow")
            bar.update(task, completed=number, metrics=f"loss {loss:.3f}  {latest}")

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
                value = found["pooled"] if name == "ece" else found["mean"]
                parts.append(f"{group}.{name} {value:.4f}")
    return "  ".join(parts)


def _drop(failure: Record) -> str:
    client = failure.get("id", failure["client"])
    return f"round {failure['round']}: client {client} dropped: {failure['reason']}"
