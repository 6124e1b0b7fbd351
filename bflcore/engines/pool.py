"""Process pools: persistent worker processes that share data and broadcast with their parent.

A process is started once per run, receives the problem once (its tensors in shared memory), and
then one short message per task. What belongs to a client travels as bytes: a tensor in shared
memory costs each side an open file, of which a process may have few, and there may be many
clients. A process that dies, or takes too long, costs the round its current clients only.
"""

from __future__ import annotations

import abc
import io
import math
import pickle
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import multiprocessing

from bflcore.errors import ClientError

if TYPE_CHECKING:
    from bflcore.engines.client import ClientWorker, Memory, Stage
    from bflcore.messages import Broadcast

__all__ = ["InProcessPool", "Pool", "ProcessPool", "Task", "open_pool", "single_threaded"]

Reply = list[Any]  # one entry per result or error

STARTED = b"started"


@attrs.frozen(eq=False)
class Task:
    """Clients to fit or to evaluate together, and their memories."""

    clients: Sequence[int]
    memories: Sequence[Memory]

    def run(self, worker: ClientWorker, stage: Stage, broadcast: Broadcast) -> Reply:
        """Have the worker do it."""
        work: Any = worker.fit if stage == "fit" else worker.evaluate
        reply: Reply = work(broadcast, self.clients, self.memories)
        return reply


class Pool(abc.ABC):
    """Runs tasks; replies come back in the order of the tasks."""

    @abc.abstractmethod
    def run(self, stage: Stage, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run `stage` for every task."""


@contextmanager
def open_pool(worker: ClientWorker, processes: int, timeout: float = 0) -> Iterator[Pool]:
    """Yield a pool; this process alone if `processes` is 1 and there is no time limit.

    `timeout` is the time that a client may take, in seconds (0 = no limit).
    """
    if processes == 1 and not timeout:
        yield InProcessPool(worker)
        return
    pool = ProcessPool(worker, processes, timeout)
    try:
        yield pool
    finally:
        pool.close()


@attrs.frozen(eq=False)
class InProcessPool(Pool):
    """Runs tasks in this process, one after the other."""

    worker: ClientWorker

    def run(self, stage: Stage, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run `stage` for every task."""
        for task in tasks:
            yield task.run(self.worker, stage, broadcast)


@attrs.frozen
class Assignment:
    """The task that a process works on, by number, and when its time is over."""

    process: int
    task: int
    deadline: float = math.inf


class ProcessPool(Pool):
    """Worker processes, each taking the next task as it becomes free."""

    def __init__(self, worker: ClientWorker, processes: int, timeout: float) -> None:
        worker.problem.train.share_memory()
        worker.problem.test.share_memory()
        self._timeout = timeout
        self._worker = worker
        self._context = multiprocessing.get_context("spawn")  # fork is unsafe once torch ran
        self._processes = [self._start() for _ in range(processes)]

    def run(self, stage: Stage, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Hand out tasks; yield replies in order, early ones held back until their turn."""
        shared = _in_shared_memory(broadcast)
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Connection, Assignment] = {}
        done: dict[int, Reply] = {}
        due = 0
        idle = list(range(len(self._processes)))
        while due < len(tasks):
            while idle and waiting:
                process, (number, task) = idle.pop(0), waiting.pop()
                busy[self._send(process, (stage, shared), task)] = Assignment(process, number)
            for connection in self._ready(busy):
                assignment = busy.pop(connection)
                reply = self._receive(assignment, stage, tasks[assignment.task])
                if reply is None:  # it has started: from now on its time counts
                    busy[connection] = self._with_deadline(assignment, tasks[assignment.task])
                    continue
                done[assignment.task] = reply
                idle.append(assignment.process)
            while due in done:
                yield done.pop(due)
                due += 1

    def close(self) -> None:
        """Stop every process."""
        for _, connection in self._processes:
            connection.close()  # an idle process ends when its connection is closed
        for process, _ in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()

    def _ready(self, busy: Mapping[Connection, Assignment]) -> list[Connection]:
        """Wait for processes that sent something, or whose time is over."""
        deadline = min(assignment.deadline for assignment in busy.values())
        seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = cast("list[Connection]", wait(list(busy), seconds))
        late = [c for c, assignment in busy.items() if assignment.deadline <= time.monotonic()]
        return [*ready, *(connection for connection in late if connection not in ready)]

    def _with_deadline(self, assignment: Assignment, task: Task) -> Assignment:
        if not self._timeout:
            return assignment
        seconds = self._timeout * len(task.clients)
        return attrs.evolve(assignment, deadline=time.monotonic() + seconds)

    def _start(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._worker), daemon=True)
        process.start()
        there.close()
        return process, here

    def _send(self, process: int, shared: object, task: Task) -> Connection:
        def send(connection: Connection) -> Connection:
            connection.send(shared)
            connection.send_bytes(_pack(task))
            return connection

        try:
            return send(self._processes[process][1])
        except OSError:  # it died while idle
            self._processes[process] = self._start()
            return send(self._processes[process][1])

    def _receive(self, assignment: Assignment, stage: Stage, task: Task) -> Reply | None:
        """Return the reply of a process that is ready or late; None if it has just started."""
        process, connection = self._processes[assignment.process]
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
        self._processes[assignment.process] = self._start()
        return [ClientError(client, stage, reason) for client in task.clients]


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let torch use one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _serve(connection: Connection, worker: ClientWorker) -> None:
    """Serve until the connection is closed, or the process at its other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pool
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            stage, broadcast = connection.recv()
            task: Task = _unpack(connection.recv_bytes())
            connection.send_bytes(STARTED)
            connection.send_bytes(_pack(task.run(worker, stage, broadcast)))


class _Pickler(pickle.Pickler):
    """Writes tensors as numpy arrays, which is faster than their own way."""

    def reducer_override(self, thing: object) -> Any:
        if type(thing) is not torch.Tensor or thing.device.type != "cpu":
            return NotImplemented
        if thing.requires_grad or thing.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (thing.numpy(),)


def _pack(thing: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


def _unpack(written: bytes) -> Any:
    return pickle.loads(written)  # noqa: S301 - from this run's own processes


def _in_shared_memory(broadcast: Broadcast) -> Broadcast:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_shared() else tensor.clone().share_memory_()

    hyper: Mapping[str, torch.Tensor] = {n: move(t) for n, t in broadcast.hyper.items()}
    start = broadcast.start.map(move)
    prior = start if broadcast.prior is broadcast.start else broadcast.prior.map(move)
    return attrs.evolve(broadcast, start=start, prior=prior, hyper=hyper)
