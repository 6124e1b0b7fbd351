"""Flower's simulation as a context manager.

Flower expects to control the process: it calls a server function with a grid. Here that function
runs in another thread, passes the grid to the run, and waits until the run is over.
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
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # it warns at every start

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from bfl_flower.node import Node
from bfl_flower.wire import ACTIONS
from bflcore.engines.client import ClientWorker
from bflcore.errors import RunError

if TYPE_CHECKING:
    from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig

    from bflcore.inference.base import LocalInference
    from bflcore.problem.base import Problem

__all__ = ["simulate_clients", "simulate_nodes"]


@contextmanager
def simulate_clients(
    problem: Problem, inference: LocalInference, bins: int, workers: int
) -> Iterator[Grid]:
    """Yield the grid of a simulation in which every client is a node."""
    with tempfile.TemporaryDirectory(prefix="bfl-flower-") as folder:
        file = Path(folder) / "worker.pt"
        torch.save(ClientWorker(problem, inference, bins), file)
        nodes = len(problem.clients) + len(problem.novel)
        with simulate_nodes(_client_app(str(file)), nodes, workers) as grid:
            yield grid


@contextmanager
def simulate_nodes(client: ClientApp, nodes: int, workers: int) -> Iterator[Grid]:
    """Yield the grid of a simulation with `nodes` nodes; it ends with the context."""
    ready: SimpleQueue[Grid | BaseException] = SimpleQueue()
    over = threading.Event()
    server = ServerApp()

    @server.main()
    def hand_over(grid: Grid, context: Context) -> None:  # noqa: ARG001 - Flower's signature
        ready.put(grid)
        over.wait()

    def simulate() -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        try:
            run_simulation(server, client, nodes, backend_config=_backend(workers))
        except BaseException as error:  # noqa: BLE001 - passed on to the run
            ready.put(error)

    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    thread.start()
    try:
        yield _first(ready, thread)
    finally:
        over.set()
        thread.join()


def _first(ready: SimpleQueue[Grid | BaseException], thread: threading.Thread) -> Grid:
    """Wait for the grid. Raises `RunError` if the simulation ends without one."""
    while True:
        try:
            found = ready.get(timeout=1)
        except Empty:
            if thread.is_alive():
                continue
            found = RuntimeError("it ended immediately")
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
    """Return the app that Ray's processes run; its contents are pickled with every message."""
    app = ClientApp()
    answer = partial(_answer, file)
    for register in (app.train(), app.evaluate(), *map(app.query, ACTIONS)):
        register(answer)
    return app


def _answer(file: str, message: Message, context: Context) -> Message:
    worker = _worker(file)
    everyone = sorted((*worker.problem.clients, *worker.problem.novel))
    client = everyone[int(cast("int", context.node_config["partition-id"]))]
    return Node(client, worker).answer(message)


@lru_cache(maxsize=1)
def _worker(file: str) -> ClientWorker:
    """Load the worker of this process, once; its tensors are memory-mapped."""
    worker: ClientWorker = torch.load(file, weights_only=False, mmap=True)
    return worker
