"""Process pools: persistent worker processes that share the data with their parent.

A process is started once per run, receives the problem once (its tensors in shared memory), the
broadcast with its first task of a stage, and then one short message per task. All of it travels as
bytes: a tensor in shared memory would cost each side an open file, and leave a socket behind when
the parent is killed. What comes back is not trusted: `packing` reads it, and pickle never does.

When a process dies, its task is tried once more in a new one, in case something else killed it;
when that one dies, too, or takes too long, the round loses only the clients it was working on.
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
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import multiprocessing

from bflcore.engines import packing
from bflcore.errors import ClientError
from bflcore.files import memory
from bflcore.messages import Broadcast, LocalResult

if TYPE_CHECKING:
    from bflcore.engines.client import ClientWorker, Memory, Stage
    from bflcore.engines.packing import Reply
    from bflcore.posteriors import Posterior

__all__ = ["InProcessPool", "Pool", "ProcessPool", "Task", "open_pool", "single_threaded"]

Shared = Broadcast | Mapping[str, torch.Tensor]  # what all tasks of a stage get

STARTED = b"started"
STARTING = 120.0  # seconds that a process may take to start, or to receive a task
LONGEST = 1e6  # seconds to wait at a time: what the system accepts


@attrs.frozen(eq=False)
class Task:
    """Clients to fit or to evaluate together, and their memories."""

    clients: Sequence[int]
    memories: Sequence[Memory]

    def run(self, worker: ClientWorker, stage: Stage, shared: Shared) -> list[Reply]:
        """Run the stage with the worker."""
        replies: list[Reply] = getattr(worker, stage)(shared, self.clients, self.memories)
        return replies

    def loaded(self) -> Task:
        """Return the task with all memories in RAM: what keeps them from it is no client's."""
        return Task(self.clients, [dict(memory.items()) for memory in self.memories])


@attrs.frozen(eq=False)
class InProcessPool:
    """Runs tasks in this process, one after the other."""

    worker: ClientWorker

    def run(self, stage: Stage, shared: Shared, tasks: Sequence[Task]) -> Iterator[list[Reply]]:
        """Run `stage` for every task."""
        for task in tasks:
            yield task.loaded().run(self.worker, stage, shared)


@attrs.define(eq=False)
class Process:
    """A worker process, the connection to it, and the number of the stage that it knows."""

    process: Any
    connection: Connection
    stage: int = -1


@attrs.frozen
class Assignment:
    """The task that a process works on (both by number), and its deadline."""

    process: int
    task: int
    deadline: float = math.inf
    started: bool = False


@attrs.frozen
class Work:
    """A stage by number, what all its tasks get, as bytes, and the family of the results."""

    number: int
    stage: Stage
    common: bytes
    family: type[Posterior] | None


class ProcessPool:
    """Worker processes, each taking the next task as it becomes free."""

    def __init__(self, worker: ClientWorker, processes: int, timeout: float) -> None:
        for samples in worker.problem.samples.values():
            samples.share_memory()
        if worker.problem.foreign is not None:
            worker.problem.foreign.share_memory_()
        self._timeout = timeout
        self._worker = worker
        self._stages = count()
        self._context = multiprocessing.get_context("spawn")  # fork is unsafe once torch ran
        self._processes = [self._start() for _ in range(processes)]

    def run(self, stage: Stage, shared: Shared, tasks: Sequence[Task]) -> Iterator[list[Reply]]:
        """Run `stage` for every task; replies come in order, early ones wait for their turn."""
        family = type(shared.start) if isinstance(shared, Broadcast) else None
        work = Work(next(self._stages), stage, _pack((stage, *_plain(shared))), family)
        waiting = deque(enumerate(tasks))
        idle = list(range(len(self._processes)))
        busy: dict[Connection, Assignment] = {}
        done: dict[int, list[Reply]] = {}
        again: set[int] = set()  # tasks whose process has died once
        for due in range(len(tasks)):
            while due not in done:
                while idle and waiting:
                    process, (number, task) = idle.pop(0), waiting.popleft()
                    connection = self._send(process, work, task)
                    # Until it says that it has started, it may be starting, receiving or frozen.
                    patience = STARTING + self._timeout if self._timeout else math.inf
                    busy[connection] = Assignment(process, number, time.monotonic() + patience)
                for connection in _ready(busy):
                    assignment = busy.pop(connection)
                    number, task = assignment.task, tasks[assignment.task]
                    try:
                        replies = self._receive(assignment, work, task)
                    except Lost as lost:
                        self._processes[assignment.process] = self._start()
                        if lost.worth_another and number not in again:
                            again.add(number)
                            waiting.appendleft((number, task))
                            idle.append(assignment.process)
                            continue
                        replies = _errors(task, work, str(lost))
                    if replies is None:  # it has started: from now on its time counts
                        seconds = self._timeout * len(task.clients) or math.inf
                        deadline = time.monotonic() + seconds
                        started = attrs.evolve(assignment, deadline=deadline, started=True)
                        busy[connection] = started
                    else:
                        done[number] = replies
                        idle.append(assignment.process)
            yield done.pop(due)

    def close(self) -> None:
        """Stop every process."""
        for one in self._processes:
            one.connection.close()  # an idle process ends when its connection is closed
        for one in self._processes:
            one.process.join(timeout=2)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()

    def _start(self) -> Process:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._worker), daemon=True)
        process.start()
        there.close()
        return Process(process, here)

    def _send(self, number: int, work: Work, task: Task) -> Connection:
        if not self._processes[number].process.is_alive():  # it died while idle
            self._processes[number] = self._start()
        one = self._processes[number]
        messages = (b"" if one.stage == work.number else work.common, _pack(task.loaded()))
        one.stage = work.number
        if self._timeout:  # a frozen process takes nothing in, and must not freeze this one
            arguments = (one.connection, messages)
            threading.Thread(target=_deliver, args=arguments, daemon=True).start()
        else:
            _deliver(one.connection, messages)
        return one.connection

    def _receive(self, given: Assignment, work: Work, task: Task) -> list[Reply] | None:
        """Return the replies of a process that is ready or late; None if it has just started.

        Raises `Lost`, and then the process has ended.
        """
        one = self._processes[given.process]
        try:
            if one.connection.poll():
                with _killed_at(given.deadline, one.process):  # it may freeze while it sends
                    message = one.connection.recv_bytes(memory() // 2)
                if message == STARTED and not given.started:
                    return None
                return _replies(message, work, task, self._worker.problem.device)
            one.process.kill()
        except (EOFError, OSError):
            one.process.join(timeout=5)
            if one.process.is_alive():
                one.process.kill()
        one.process.join()
        one.connection.close()
        if time.monotonic() >= given.deadline:
            raise Lost(f"it took longer than {self._timeout:g} s (--client-timeout)")
        reason = f"its worker process died (exit code {one.process.exitcode})"
        raise Lost(reason, worth_another=True)


class Lost(Exception):  # noqa: N818 - no error of the program
    """A process has ended before it replied; `worth_another` try unless it was too slow."""

    def __init__(self, reason: str, *, worth_another: bool = False) -> None:
        super().__init__(reason)
        self.worth_another = worth_another


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


def _deliver(connection: Connection, messages: Sequence[bytes]) -> None:
    with suppress(OSError, TypeError):  # it died while receiving: `_receive` reports it
        for message in messages:
            connection.send_bytes(message)


@contextmanager
def _killed_at(deadline: float, process: Any) -> Iterator[None]:
    """Kill a process if the block is not left before its deadline."""
    if deadline == math.inf:
        yield
        return
    seconds = min(max(0.0, deadline - time.monotonic()), LONGEST)
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _replies(message: bytes, work: Work, task: Task, device: torch.device) -> list[Reply]:
    """Return the replies in a message; of each client of the task, and of nobody else."""
    try:
        found = packing.unpack(message, work.family, device)
    except ValueError as error:
        return _errors(task, work, f"malformed reply ({error})")
    named = [r.clients if isinstance(r, LocalResult) else (r.client,) for r in found]
    if not all(type(client) is int and client in task.clients for one in named for client in one):
        return _errors(task, work, f"malformed reply (it names {named}, not its own clients)")
    if work.stage == "evaluate":  # a client without samples has nothing to say
        return found
    silent = set(task.clients).difference(*named)
    return found + [ClientError(client, work.stage, "it did not reply") for client in silent]


def _errors(task: Task, work: Work, reason: str) -> list[Reply]:
    return [ClientError(client, work.stage, reason) for client in task.clients]


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
    stage: Stage = "survey"
    shared: Shared = {}
    with suppress(EOFError, OSError):
        while True:
            if common := connection.recv_bytes():  # empty: the stage is the same as before
                stage, *plain = _unpack(common)
                shared = _shared(*plain)
            task: Task = _unpack(connection.recv_bytes())
            connection.send_bytes(STARTED)
            connection.send_bytes(_answer(task, worker, stage, shared))


def _answer(task: Task, worker: ClientWorker, stage: Stage, shared: Shared) -> bytearray:
    """Run a task and return its replies as bytes; errors, if they cannot be sent."""
    replies = task.run(worker, stage, shared)
    try:
        return packing.pack(replies)
    except Exception as error:  # noqa: BLE001 - whatever an inference put into a reply
        reason = f"malformed reply ({type(error).__name__}: {error})"
        return packing.pack([ClientError(client, stage, reason) for client in task.clients])


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
    return pickle.loads(written)  # noqa: S301 - in a worker process, from its parent


def _plain(shared: Shared) -> tuple[int, type[Posterior] | None, dict[str, torch.Tensor]]:
    """Return what all tasks of a stage get: a round, a family and tensors ``[...]``."""
    if isinstance(shared, Broadcast):
        return shared.round, type(shared.start), shared.pack()
    return 0, None, dict(shared)


def _shared(
    round: int, family: type[Posterior] | None, tensors: Mapping[str, torch.Tensor]
) -> Shared:
    """Return what `_plain` was given."""
    # Copied: tensors made from bytes begin anywhere in memory, which may change the last bit.
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    return own if family is None else Broadcast.unpack(round, own, family)
