"""Process pools: persistent worker processes that share data and broadcast with their parent.

A process is started once per run, receives the problem once (its tensors in shared memory), and
then one short message per task. What belongs to a client travels as bytes: a tensor in shared
memory costs each side an open file, of which a process may have few, and there may be many
clients. When a process dies or takes too long, the round loses only the clients it was working on.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import multiprocessing

from bflcore.errors import ClientError
from bflcore.messages import Broadcast

if TYPE_CHECKING:
    from bflcore.engines.client import ClientWorker, Memory, Stage

__all__ = ["InProcessPool", "Pool", "ProcessPool", "Task", "open_pool", "single_threaded"]

Reply = list[Any]  # one entry per result or error
Shared = Broadcast | Mapping[str, torch.Tensor]  # what all tasks of a stage get

STARTED = b"started"
STARTING = 120.0  # seconds that a process may take to start, or to receive a task
LONGEST = 1e6  # seconds to wait at a time: what the system accepts


@attrs.frozen(eq=False)
class Task:
    """Clients to fit or to evaluate together, and their memories."""

    clients: Sequence[int]
    memories: Sequence[Memory]

    def run(self, worker: ClientWorker, stage: Stage, shared: Shared) -> Reply:
        """Run the stage with the worker."""
        reply: Reply = getattr(worker, stage)(shared, self.clients, self.memories)
        return reply


@attrs.frozen(eq=False)
class InProcessPool:
    """Runs tasks in this process, one after the other."""

    worker: ClientWorker

    def run(self, stage: Stage, shared: Shared, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run `stage` for every task."""
        for task in tasks:
            yield task.run(self.worker, stage, shared)


@attrs.frozen
class Assignment:
    """The task that a process works on (both by number), and its deadline."""

    process: int
    task: int
    deadline: float = math.inf


class ProcessPool:
    """Worker processes, each taking the next task as it becomes free."""

    def __init__(self, worker: ClientWorker, processes: int, timeout: float) -> None:
        for samples in worker.problem.samples.values():
            samples.share_memory()
        if worker.problem.foreign is not None:
            worker.problem.foreign.share_memory_()
        self._timeout = timeout
        self._worker = worker
        self._context = multiprocessing.get_context("spawn")  # fork is unsafe once torch ran
        self._processes = [self._start() for _ in range(processes)]

    def run(self, stage: Stage, shared: Shared, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run `stage` for every task; replies come in order, early ones wait for their turn."""
        moved = _in_shared_memory(shared)
        waiting = deque(enumerate(tasks))
        idle = list(range(len(self._processes)))
        busy: dict[Connection, Assignment] = {}
        done: dict[int, Reply] = {}
        for due in range(len(tasks)):
            while due not in done:
                while idle and waiting:
                    process, (number, task) = idle.pop(0), waiting.popleft()
                    connection = self._send(process, (stage, moved), task)
                    # Until it says that it has started, it may be starting, receiving or frozen.
                    patience = STARTING + self._timeout if self._timeout else math.inf
                    busy[connection] = Assignment(process, number, time.monotonic() + patience)
                for connection in _ready(busy):
                    assignment = busy.pop(connection)
                    task = tasks[assignment.task]
                    reply = self._receive(assignment.process, stage, task)
                    if reply is None:  # it has started: from now on its time counts
                        seconds = self._timeout * len(task.clients) or math.inf
                        deadline = time.monotonic() + seconds
                        busy[connection] = attrs.evolve(assignment, deadline=deadline)
                    else:
                        done[assignment.task] = reply
                        idle.append(assignment.process)
            yield done.pop(due)

    def close(self) -> None:
        """Stop every process."""
        for _, connection in self._processes:
            connection.close()  # an idle process ends when its connection is closed
        for process, _ in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._worker), daemon=True)
        process.start()
        there.close()
        return process, here

    def _send(self, number: int, shared: object, task: Task) -> Connection:
        if not self._processes[number][0].is_alive():  # it died while idle
            self._processes[number] = self._start()
        connection = self._processes[number][1]
        if self._timeout:  # a frozen process takes nothing in, and must not freeze this one
            threading.Thread(target=_deliver, args=(connection, shared, task), daemon=True).start()
        else:
            _deliver(connection, shared, task)
        return connection

    def _receive(self, number: int, stage: Stage, task: Task) -> Reply | None:
        """Return the reply of a process that is ready or late; None if it has just started."""
        process, connection = self._processes[number]
        try:
            if connection.poll():
                message = connection.recv_bytes()
                return None if message == STARTED else _unpack(message)
            reason = f"it took longer than {self._timeout:g} s (--client-timeout)"
            process.kill()
            process.join()
        except (EOFError, OSError):
            process.join(timeout=5)
            reason = f"its worker process died (exit code {process.exitcode})"
        connection.close()
        self._processes[number] = self._start()
        return [ClientError(client, stage, reason) for client in task.clients]


Pool = InProcessPool | ProcessPool  # runs tasks; replies come back in the order of the tasks


@contextmanager
def open_pool(worker: ClientWorker, processes: int, timeout: float = 0) -> Iterator[Pool]:
    """Yield a pool; this process alone if `processes` is 1 and there is no time limit.

    `timeout` is the time that a client may take, in seconds (0 = no limit).
    """
    if processes == 1 and not timeout:
        yield InProcessPool(worker)
        return
    with closing(ProcessPool(worker, processes, timeout)) as pool:
        yield pool


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let torch use one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _deliver(connection: Connection, shared: object, task: Task) -> None:
    with suppress(OSError, TypeError):  # it died while receiving: `_receive` reports it
        connection.send(shared)
        connection.send_bytes(_pack(task))


def _ready(busy: Mapping[Connection, Assignment]) -> list[Connection]:
    """Wait for processes that sent something, or whose time is over."""
    deadline = min(assignment.deadline for assignment in busy.values())
    left = deadline - time.monotonic()
    seconds = None if deadline == math.inf else min(max(0.0, left), LONGEST)
    ready, now = wait(list(busy), seconds), time.monotonic()
    return [c for c, assignment in busy.items() if c in ready or assignment.deadline <= now]


def _serve(connection: Connection, worker: ClientWorker) -> None:
    """Serve until the connection is closed, or the process at its other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            stage, shared = connection.recv()
            task: Task = _unpack(connection.recv_bytes())
            connection.send_bytes(STARTED)
            connection.send_bytes(_pack(task.run(worker, stage, shared)))


def _end_with_parent() -> None:
    """End this process when its parent is gone, whatever it is working on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Pickler(pickle.Pickler):
    """Writes tensors as numpy arrays, which is faster than their own way."""

    def reducer_override(self, thing: object) -> Any:
        if type(thing) is not torch.Tensor or thing.device.type != "cpu":
            return NotImplemented
        if thing.requires_grad or thing.dtype == torch.bfloat16:  # numpy has neither
            return NotImplemented
        return torch.from_numpy, (thing.numpy(),)


def _pack(thing: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


def _unpack(written: bytes) -> Any:
    return pickle.loads(written)  # noqa: S301 - from this run's own processes


def _in_shared_memory(shared: Shared) -> Shared:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_shared() else tensor.clone().share_memory_()

    tensors = shared.pack() if isinstance(shared, Broadcast) else shared
    moved = {name: move(tensor) for name, tensor in tensors.items()}
    if not isinstance(shared, Broadcast):
        return moved
    return Broadcast.unpack(shared.round, moved, type(shared.start))
