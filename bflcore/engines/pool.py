"""The crew: persistent worker processes that share the data and the broadcast with their parent.

A worker is started once per run, receives the problem once (its tensors in shared memory), and
then one short message a task. What belongs to a client travels as bytes: a tensor in shared memory
costs each side an open file, of which a process may have few, and there may be many clients. A
worker that dies, or takes too long, costs the round its current clients only.
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

from bflcore.engines.client import evaluate_clients, fit_clients
from bflcore.errors import ClientError

if TYPE_CHECKING:
    from bflcore.engines.client import Memory
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast
    from bflcore.problem.base import Problem

__all__ = ["Crew", "crew"]

Task = tuple[Sequence[int], "list[Memory]"]
Reply = list[Any]

BEGUN = b"begun"


class Crew(abc.ABC):
    """Whoever runs tasks; replies come back in the order of the tasks."""

    @abc.abstractmethod
    def run(self, stage: str, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run `stage` (``fit`` or ``evaluate``) for every task."""


@contextmanager
def crew(
    problem: Problem, inference: LocalInference, bins: int, count: int, timeout: float = 0
) -> Iterator[Crew]:
    """Yield a crew of `count` processes: this one if it is 1 and has no time limit to keep.

    `timeout` is what a client may take, in seconds; 0: any time.
    """
    if count == 1 and not timeout:
        yield Alone(problem, inference, bins)
        return
    staff = Staff(problem, inference, bins, count, timeout)
    try:
        yield staff
    finally:
        staff.dismiss()


class Alone(Crew):
    """This process."""

    def __init__(self, problem: Problem, inference: LocalInference, bins: int) -> None:
        self._site = Site(problem, inference, bins)

    def run(self, stage: str, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run the tasks one after the other."""
        for task in tasks:
            yield self._site.run(stage, broadcast, task)


@attrs.frozen(eq=False)
class Site:
    """What a worker holds for the whole run."""

    problem: Problem
    inference: LocalInference
    bins: int

    def run(self, stage: str, broadcast: Broadcast, task: Task) -> Reply:
        """Run one task."""
        clients, memories = task
        if stage == "fit":
            return fit_clients(self.problem, self.inference, broadcast, clients, memories)
        return evaluate_clients(
            self.problem, self.inference, broadcast, clients, memories, self.bins
        )


@attrs.frozen
class Job:
    """What a worker is at: the number of its task, and when its time is over."""

    worker: int
    number: int
    end: float = math.inf


class Staff(Crew):
    """Worker processes, each taking the next task as it becomes free."""

    def __init__(
        self, problem: Problem, inference: LocalInference, bins: int, count: int, timeout: float
    ) -> None:
        problem.train.share_memory()
        problem.test.share_memory()
        self._timeout = timeout
        self._site = Site(problem, inference, bins)
        self._context = multiprocessing.get_context("spawn")  # fork is unsafe once torch ran
        self._workers = [self._hire() for _ in range(count)]

    def run(self, stage: str, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Hand out tasks; yield replies in order, early ones held back until their turn."""
        shared = _in_shared_memory(broadcast)
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Connection, Job] = {}
        done: dict[int, Reply] = {}
        due = 0
        idle = list(range(len(self._workers)))
        while due < len(tasks):
            while idle and waiting:
                worker, (number, task) = idle.pop(0), waiting.pop()
                busy[self._send(worker, (stage, shared), task)] = Job(worker, number)
            for link in self._news(busy):
                job = busy.pop(link)
                reply = self._receive(job, stage, tasks[job.number])
                if reply is None:  # it has begun: from now on its time counts
                    seconds = self._timeout * len(tasks[job.number][0])
                    end = time.monotonic() + seconds if seconds else math.inf
                    busy[link] = attrs.evolve(job, end=end)
                    continue
                done[job.number] = reply
                idle.append(job.worker)
            while due in done:
                yield done.pop(due)
                due += 1

    def dismiss(self) -> None:
        """Stop every worker."""
        for _, link in self._workers:
            link.close()  # an idle worker ends when its line is closed
        for process, _ in self._workers:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()

    def _news(self, busy: Mapping[Connection, Job]) -> list[Connection]:
        """Wait for workers that have something to say, or whose time is over."""
        end = min(job.end for job in busy.values())
        seconds = None if end == math.inf else max(0.0, end - time.monotonic())
        speaking = cast("list[Connection]", wait(list(busy), seconds))
        late = [link for link, job in busy.items() if job.end <= time.monotonic()]
        return [*speaking, *(link for link in late if link not in speaking)]

    def _hire(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._site), daemon=True)
        process.start()
        there.close()
        return process, here

    def _send(self, worker: int, shared: object, task: Task) -> Connection:
        def send(link: Connection) -> Connection:
            link.send(shared)
            link.send_bytes(_packed(task))
            return link

        try:
            return send(self._workers[worker][1])
        except OSError:  # it died while idle
            self._workers[worker] = self._hire()
            return send(self._workers[worker][1])

    def _receive(self, job: Job, stage: str, task: Task) -> Reply | None:
        """Return the reply of a worker that speaks or is late; None: it says that it begins."""
        process, link = self._workers[job.worker]
        try:
            if link.poll():
                said = link.recv_bytes()
                return None if said == BEGUN else _unpacked(said)
            reason = f"it took longer than {self._timeout:g} s (--client-timeout)"
            process.kill()
            process.join()
        except (EOFError, OSError):
            process.join(timeout=5)
            reason = f"its worker process died (exit code {process.exitcode})"
        link.close()
        self._workers[job.worker] = self._hire()
        return [ClientError(client, stage, reason) for client in task[0]]


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let torch use one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _serve(link: Connection, site: Site) -> None:
    """Serve until the line is closed, or whoever holds its other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who says goodbye
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            stage, broadcast = link.recv()
            task = _unpacked(link.recv_bytes())
            link.send_bytes(BEGUN)
            link.send_bytes(_packed(site.run(stage, broadcast, task)))


class _Pickler(pickle.Pickler):
    """Writes tensors as numpy arrays, which is faster than their own way."""

    def reducer_override(self, thing: object) -> Any:
        if type(thing) is not torch.Tensor or thing.device.type != "cpu":
            return NotImplemented
        if thing.requires_grad or thing.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (thing.numpy(),)


def _packed(thing: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


def _unpacked(written: bytes) -> Any:
    return pickle.loads(written)  # noqa: S301 - of this run's own processes


def _in_shared_memory(broadcast: Broadcast) -> Broadcast:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_shared() else tensor.clone().share_memory_()

    hyper: Mapping[str, torch.Tensor] = {n: move(t) for n, t in broadcast.hyper.items()}
    start = broadcast.start.map(move)
    prior = start if broadcast.prior is broadcast.start else broadcast.prior.map(move)
    return attrs.evolve(broadcast, start=start, prior=prior, hyper=hyper)
