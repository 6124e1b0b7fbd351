"""Flower's simulation, opened and closed around a run that stays in charge.

Flower wants to own the process: it calls a server function and hands it a grid. Here that function
gives the grid away and waits until the run is over.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, cast

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # says so at every start otherwise

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from bfl_flower.node import Node
from bflcore.engines.pool import Site
from bflcore.errors import RunError

if TYPE_CHECKING:
    from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig

    from bflcore.inference.base import LocalInference
    from bflcore.problem.base import Problem

__all__ = ["simulated", "simulation"]


@contextmanager
def simulated(
    problem: Problem, inference: LocalInference, bins: int, workers: int
) -> Iterator[Grid]:
    """Yield the grid of a simulation in which every client is a node."""
    with tempfile.TemporaryDirectory(prefix="bfl-flower-") as folder:
        file = Path(folder) / "site.pt"
        torch.save(Site(problem, inference, bins), file)
        nodes = len(problem.clients) + len(problem.novel)
        with simulation(_client_app(str(file)), nodes, workers) as grid:
            yield grid


@contextmanager
def simulation(client: ClientApp, nodes: int, workers: int) -> Iterator[Grid]:
    """Yield the grid of a simulation of so many nodes; it ends with the context."""
    ready: SimpleQueue[Grid | BaseException] = SimpleQueue()
    over = threading.Event()
    server = ServerApp()

    @server.main()
    def lend(grid: Grid, context: Context) -> None:  # noqa: ARG001 - Flower's signature
        ready.put(grid)
        over.wait()

    def simulate() -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        try:
            run_simulation(server, client, nodes, backend_config=_backend(workers))
        except BaseException as error:  # noqa: BLE001 - the run must hear of it
            ready.put(error)

    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    thread.start()
    try:
        yield _first(ready, thread)
    finally:
        over.set()
        thread.join()


def _first(ready: SimpleQueue[Grid | BaseException], thread: threading.Thread) -> Grid:
    """Wait for the grid. Raises `RunError` when the simulation ends without giving one."""
    while True:
        try:
            found = ready.get(timeout=1)
        except Empty:
            if thread.is_alive():
                continue
            found = RuntimeError("it ended at once")
        if isinstance(found, Grid):
            return found
        raise RunError(f"--engine flower: the simulation did not start ({found})") from None


def _backend(workers: int) -> BackendConfig:
    cores = workers or os.cpu_count() or 1
    return {
        "init_args": {
            "num_cpus": cores,
            "include_dashboard": False,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }


def _client_app(file: str) -> ClientApp:
    """Return the app that Ray's processes run; what it holds is pickled with every message."""
    app = ClientApp()
    answer = partial(_answer, file)
    for register in (app.train(), app.evaluate(), app.query()):
        register(answer)
    return app


def _answer(file: str, message: Message, context: Context) -> Message:
    site = _site(file)
    everyone = sorted((*site.problem.clients, *site.problem.novel))
    client = everyone[int(cast("int", context.node_config["partition-id"]))]
    return Node(client, site).answer(message)


@lru_cache(maxsize=1)
def _site(file: str) -> Site:
    """Read what the run wrote for its own workers, once a process; tensors stay in the file."""
    site: Site = torch.load(file, weights_only=False, mmap=True)
    return site
