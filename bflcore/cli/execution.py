"""Executing a prepared run from the command line: progress, interruption, report."""

from __future__ import annotations

import json
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bflcore.cli.progress import print_final, print_header, show_progress
from bflcore.errors import RoundError, WriteError
from bflcore.experiments.caveats import caveats

if TYPE_CHECKING:
    from bflcore.experiments.directory import RunDirectory
    from bflcore.experiments.prepare import Prepared

__all__ = ["Ended", "execute_and_report", "interruptible", "tidy_end"]


def execute_and_report(
    prepared: Prepared, directory: RunDirectory, *, quiet: bool, as_json: bool
) -> None:
    """Run the remaining rounds and write the report; if it is cut short, say how to continue.

    Warnings come first, on standard error, even if `quiet`; notes follow on a run that begins.
    """
    from bflcore.experiments.run import execute

    checkpoints, path = directory.checkpoints, directory.path
    done = checkpoints.reached or 0
    # A run that is resumed may still be refused, in one line.
    if not (quiet or as_json) and checkpoints.reached is None:
        print_header(prepared, path)
    for text in caveats(prepared):
        click.echo(f"warning: {text}", err=True)
    for text in () if quiet or done else prepared.notes:
        click.echo(text, err=True)
    silent = quiet or as_json
    try:
        with (
            interruptible(lambda: f"interrupted: {_how_to_continue(checkpoints.reached, path)}"),
            show_progress(prepared.experiment, quiet=silent, done=done) as progress,
        ):
            summary = execute(prepared, directory, progress)
    except (RoundError, WriteError) as error:
        raise type(error)(f"{error}. {_how_to_continue(checkpoints.reached, path)}") from None
    from bflcore.report import write_report  # not sooner: a run should begin at once

    try:
        report = write_report([path])
    except WriteError as error:
        step = f"Write the report with: bfl report {shlex.quote(str(path))}"
        raise WriteError(f"{error}. The run is finished. {step}") from None
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    elif not quiet:
        print_final(path)
        click.echo(f"run directory: {path}\nreport: {report}")


class Ended(KeyboardInterrupt):
    """The system asked the run to end; its argument is the number of the signal."""


@contextmanager
def interruptible(said: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end a command with one line, which says how to continue.

    The exit status is 128 plus the number of the signal.
    """
    try:
        with tidy_end():
            yield
    except KeyboardInterrupt as error:
        click.echo(said(), err=True)
        number = error.args[0] if isinstance(error, Ended) else signal.SIGINT
        raise click.exceptions.Exit(128 + number) from None


@contextmanager
def tidy_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as Ctrl-C does: nothing is left behind or lost."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _how_to_continue(reached: int | None, path: Path) -> str:
    saved = "1 round is" if reached == 1 else f"{reached or 0} rounds are"
    return f"{saved} saved. Continue with: bfl resume {shlex.quote(str(path))}"
