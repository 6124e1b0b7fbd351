"""The engine ``flower`` and the command ``bfl flower``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bflcore.engines.base import Engine
from bflcore.errors import OptionError
from bflcore.lazy import lazy
from bflcore.options import component, option
from bflcore.registry.command import Command
from bflcore.registry.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from bfl_flower import cli
    from bfl_flower.session import GridSession
    from bflcore.inference.base import LocalInference
    from bflcore.problem.base import Problem
else:
    cli = lazy("bfl_flower.cli")

START_TIMEOUT = 300.0  # seconds until the nodes of a simulation must be connected


@component
class Flower(Engine):
    """Run clients as nodes of Flower's simulation, in `workers` processes of Ray.

    Results equal those of the local engine, which is much faster: use this one to test on a single
    machine whether an experiment runs on Flower's servers and nodes.
    """

    name = "flower"
    reference = "Beutel et al. 2020, Flower: a friendly federated learning research framework"

    workers: int = option(0, "number of worker processes (0 = one per core)", at_least=0)
    client_timeout: float = option(
        0.0, "seconds to wait for a client's reply before it is dropped (0 = no limit)", at_least=0
    )

    def processes(self, problem: Problem, inference: LocalInference) -> int:
        """Return the number of processes of Ray."""
        return self.workers or os.cpu_count() or 1

    @contextmanager
    def open(self, problem: Problem, inference: LocalInference, bins: int) -> Iterator[GridSession]:
        """Start the simulation, and stop it at the end."""
        if importlib.util.find_spec("ray") is None:
            raise OptionError(
                "--engine flower: Flower's simulation needs Ray, which is not installed; "
                "pip install 'bfl-flower[simulation]'"
            )
        from bfl_flower.session import GridSession
        from bfl_flower.simulation import simulate_clients

        everyone = (*problem.clients, *problem.novel)
        with simulate_clients(problem, inference, bins, self.workers) as grid:
            family = type(inference.initial(problem))
            session = GridSession(grid, family, everyone, self.client_timeout)
            session.wait_for(len(everyone), START_TIMEOUT)
            yield session


@component
class FlowerCommand(Command):
    """Write a Flower app that runs an experiment on servers and nodes."""

    name = "flower"

    def build(self) -> click.Command:
        """Return the group of commands."""
        return cli.flower


@hookimpl
def bfl_engines() -> Iterator[type[Engine]]:
    """Yield the engine."""
    yield Flower


@hookimpl
def bfl_commands() -> Iterator[type[Command]]:
    """Yield the command."""
    yield FlowerCommand
