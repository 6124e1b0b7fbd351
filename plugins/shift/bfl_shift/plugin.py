"""The command ``bfl shift``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bflcore.lazy import lazy
from bflcore.options import component
from bflcore.registry.command import Command
from bflcore.registry.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from bfl_shift import cli
else:
    cli = lazy("bfl_shift.cli")


@component
class ShiftCommand(Command):
    """Benchmark methods under shift, and rank them by what their predictions are worth."""

    name = "shift"

    def build(self) -> click.Command:
        """Return the command."""
        return cli.shift


@hookimpl
def bfl_commands() -> Iterator[type[Command]]:
    """Yield the command."""
    yield ShiftCommand
