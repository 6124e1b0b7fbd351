"""The local engine: clients run in this process, or in persistent worker processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.engines.base import Engine, Session
from bflcore.errors import ClientError
from bflcore.options import component, option

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bflcore.engines.base import (
        CalibrateReply,
        EvaluationReply,
        FitReply,
        PersonaliseReply,
        SurveyReply,
    )
    from bflcore.engines.client import ClientWorker, Memory, Stage
    from bflcore.engines.memories import Memories
    from bflcore.engines.pool import Pool
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast, LocalResult
    from bflcore.problem.base import Problem

__all__ = ["Local", "cores"]

LOG = logging.getLogger("bflcore")

# Measured: a pass over one sample takes 10 microseconds and 0.5 ns per parameter, and starting two
# workers 7 s of processor time. Below SMALL, a run takes about ten seconds in one process.
OVERHEAD = 20_000
SMALL = 2e10


@component
class Local(Engine):
    """Run clients on this machine, in `workers` processes, `chunk` clients per training step.

    Results do not depend on `workers`; with another `chunk` they agree to rounding. On a CPU one
    client per step is fastest (everything stays in cache) and processes give the parallelism; a GPU
    trains its whole cohort at once.
    """

    name = "local"

    workers: int = option(
        0,
        "number of worker processes (0 = one for a small problem or a GPU, else one per core; one "
        "works in the run's own process, which a client that crashes the interpreter takes along)",
        at_least=0,
        at_most=512,
    )
    chunk: int = option(0, "clients per training step (0 = one on a CPU, all on a GPU)", at_least=0)
    client_timeout: float = option(
        0.0,
        "seconds after which a client that is training or being evaluated is dropped (0 = never)",
        at_least=0,
    )
    memory_limit: int = option(
        256, "MiB of client memory kept in RAM; the least recently used goes to disk", at_least=0
    )

    def clients_per_step(self, problem: Problem) -> int:
        """Return the chunk size; by default one on a CPU, and all clients on a GPU."""
        return self.chunk or (1 if problem.device.type == "cpu" else max(1, len(problem.clients)))

    def processes(self, problem: Problem, inference: LocalInference) -> int:
        """Return the number of workers; 0 chooses one where starting more would take longer.

        A pass over a sample costs about as much as `OVERHEAD` + P multiplications by weights; a run
        with less than `SMALL` of those ends before two workers have repaid their start.
        """
        if self.workers:
            return min(self.workers, max(1, len(problem.clients)))
        samples = sum(map(problem.train.size, problem.clients))
        passes = samples * max(1, problem.rounds) * int(getattr(inference, "local_epochs", 1))
        small = passes * (OVERHEAD + problem.layout.total) < SMALL
        alone = small or problem.device.type != "cpu"
        return 1 if alone else min(cores(), max(1, len(problem.clients)))

    def workplace(self, problem: Problem, inference: LocalInference) -> str:
        """Say how many processes there are."""
        count = self.processes(problem, inference)
        return f"{count} worker{'s' if count > 1 else ''}"

    @contextmanager
    def open(
        self, problem: Problem, inference: LocalInference, bins: int
    ) -> Iterator[LocalSession]:
        """Start the workers and stop them at the end."""
        from bflcore.engines.client import ClientWorker
        from bflcore.engines.memories import Memories
        from bflcore.engines.pool import open_pool, single_threaded

        count = self.processes(problem, inference)
        chunk = self.clients_per_step(problem)
        worker = ClientWorker(problem, inference, bins)
        # One thread per process, this one too: results must not depend on the number of workers,
        # and a server whose threads wait for the workers' cores spins instead of working.
        with single_threaded(), open_pool(worker, count, self.client_timeout) as pool:
            yield LocalSession(worker, pool, chunk, Memories(self.memory_limit * 2**20))


@attrs.frozen(eq=False)
class LocalSession(Session):
    """Clients on this machine; their memories stay in this process, or on its disk."""

    worker: ClientWorker
    pool: Pool
    chunk: int
    memories: Memories

    def use_folder(self, folder: Path) -> None:
        """Store memories that do not fit into RAM in `folder`."""
        self.memories.use_folder(folder)

    def restore(self, memories: Mapping[int, Memory]) -> None:
        """Store memories of an earlier session."""
        self.memories.update(memories)

    def survey(self, known: Mapping[str, Tensor], clients: Sequence[int]) -> Iterator[SurveyReply]:
        """Survey one client per task, given the sums ``[...]`` so far; see `Session.survey`."""
        from bflcore.engines.pool import Task

        for reply in self.pool.run("survey", known, [Task([client], ()) for client in clients]):
            yield from _traced(reply)

    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        """Fit in chunks; see `Session.fit`."""
        return self._run("fit", broadcast, clients, self.chunk)

    def store(self, result: LocalResult) -> None:
        """Store memories."""
        for row, client in enumerate(result.clients):
            self.memories[client] = {name: t[row] for name, t in result.memory.items()}

    def evaluate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[EvaluationReply]:
        """Evaluate one client per task; see `Session.evaluate`."""
        return self._run("evaluate", broadcast, clients, 1)

    def calibrate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[CalibrateReply]:
        """Calibrate one client per task; see `Session.calibrate`."""
        return self._run("calibrate", broadcast, clients, 1)

    def personalise(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[PersonaliseReply]:
        """Personalise one client per task; see `Session.personalise`."""
        return self._run("personalise", broadcast, clients, 1)

    def _run(
        self, stage: Stage, broadcast: Broadcast, clients: Sequence[int], chunk: int
    ) -> Iterator[Any]:
        """Run `chunk` clients per task; a client without a memory gets the initial one."""
        from bflcore.engines.pool import Task

        problem = self.worker.problem.surveyed(broadcast.survey)
        initial = self.worker.inference.initial_memory(problem)
        chunks = [clients[i : i + chunk] for i in range(0, len(clients), chunk)]
        tasks = [Task(some, [self.memories.get(c, initial) for c in some]) for some in chunks]
        for reply in self.pool.run(stage, broadcast, tasks):
            yield from _traced(reply)


def _traced(replies: Sequence[Any]) -> Iterator[Any]:
    """Yield replies; log the tracebacks of those that are errors."""
    for reply in replies:
        if isinstance(reply, ClientError) and reply.trace:
            LOG.debug("%s\n%s", reply, reply.trace)
        yield reply


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
