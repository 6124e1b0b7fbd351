"""The crew: persistent worker processes that share the data and the broadcast with their parent.

A worker is started once per run, receives the problem once (its tensors in shared memory), and
then one short message a task. A worker that dies costs the round its current clients only.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import multiprocessing

from bflcore.engines import work
from bflcore.errors import ClientError

if TYPE_CHECKING:
    from bflcore.engines.work import Memory
    from bflcore.inference import Broadcast, LocalInference
    from bflcore.problem import Problem

__all__ = ["Crew", "crew"]

Task = tuple[Sequence[int], "list[Memory]"]
Reply = list[Any]


class Crew(abc.ABC):
    """Whoever runs tasks; replies come back in the order of the tasks."""

    @abc.abstractmethod
    def run(self, stage: str, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Run `stage` (``fit`` or ``evaluate``) for every task."""


@contextmanager
def crew(problem: Problem, inference: LocalInference, bins: int, count: int) -> Iterator[Crew]:
    """Yield a crew of `count` processes: this one if it is 1."""
    if count == 1:
        yield Alone(problem, inference, bins)
        return
    staff = Staff(problem, inference, bins, count)
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
            return work.fit(self.problem, self.inference, broadcast, clients, memories)
        return work.evaluate(self.problem, self.inference, broadcast, clients, memories, self.bins)


class Staff(Crew):
    """Worker processes, each taking the next task as it becomes free."""

    def __init__(self, problem: Problem, inference: LocalInference, bins: int, count: int) -> None:
        problem.train.share_memory()
        problem.test.share_memory()
        self._site = Site(problem, inference, bins)
        self._context = multiprocessing.get_context("spawn")  # fork is unsafe once torch ran
        self._workers = [self._hire() for _ in range(count)]

    def run(self, stage: str, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Hand out tasks; yield replies in order, early ones held back until their turn."""
        shared = _in_shared_memory(broadcast)
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Connection, tuple[int, int]] = {}
        done: dict[int, Reply] = {}
        due = 0
        idle = list(range(len(self._workers)))
        while due < len(tasks):
            while idle and waiting:
                worker, (number, task) = idle.pop(0), waiting.pop()
                link = self._send(worker, (stage, shared, task))
                busy[link] = (worker, number)
            for link in cast("list[Connection]", wait(list(busy))):
                worker, number = busy.pop(link)
                done[number] = self._receive(worker, stage, tasks[number])
                idle.append(worker)
            while due in done:
                yield done.pop(due)
                due += 1

    def dismiss(self) -> None:
        """Stop every worker."""
        for process, link in self._workers:
            link.close()  # a worker ends when its line is closed
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()

    def _hire(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._site), daemon=True)
        process.start()
        there.close()
        return process, here

    def _send(self, worker: int, message: object) -> Connection:
        try:
            self._workers[worker][1].send(message)
        except OSError:  # it died while idle
            self._workers[worker] = self._hire()
            self._workers[worker][1].send(message)
        return self._workers[worker][1]

    def _receive(self, worker: int, stage: str, task: Task) -> Reply:
        process, link = self._workers[worker]
        try:
            reply: Reply = link.recv()
        except (EOFError, OSError):
            process.join(timeout=5)
            self._workers[worker] = self._hire()
            reason = f"its worker process died (exit code {process.exitcode})"
            return [ClientError(client, stage, reason) for client in task[0]]
        return reply


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
    torch.set_num_threads(1)
    while True:
        try:
            stage, broadcast, task = link.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            link.send(site.run(stage, broadcast, task))
        except KeyboardInterrupt:
            return


def _in_shared_memory(broadcast: Broadcast) -> Broadcast:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_shared() else tensor.clone().share_memory_()

    hyper: Mapping[str, torch.Tensor] = {n: move(t) for n, t in broadcast.hyper.items()}
    start = broadcast.start.map(move)
    prior = start if broadcast.prior is broadcast.start else broadcast.prior.map(move)
    return attrs.evolve(broadcast, start=start, prior=prior, hyper=hyper)
