"""The local engine: clients run in this process, or in persistent worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bflcore.engines.base import Engine, Session
from bflcore.engines.memories import Memories
from bflcore.messages import Evaluation
from bflcore.options import component, option

if TYPE_CHECKING:
    from bflcore.engines.client import Memory
    from bflcore.engines.pool import Crew
    from bflcore.errors import ClientError
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast, LocalResult
    from bflcore.problem.base import Problem

__all__ = ["Local"]


@component
class Local(Engine):
    """Run clients on this machine, in `workers` processes, `chunk` clients per training step.

    Results do not depend on either number. On a CPU one client a step is fastest (everything
    stays in cache) and processes give the parallelism; a GPU trains its whole cohort at once.
    """

    name = "local"

    workers: int = option(0, "worker processes; 0: one a core on a CPU, one on a GPU", at_least=0)
    chunk: int = option(0, "clients per training step; 0: one on a CPU, all on a GPU", at_least=0)
    client_timeout: float = option(
        0.0,
        "seconds a client may take to train or to be evaluated, before it is dropped; 0: any",
        at_least=0,
    )
    memory_limit: int = option(
        256, "MiB of clients' memories kept in this process; more lie on disk", at_least=0
    )

    @contextmanager
    def open(
        self, problem: Problem, inference: LocalInference, bins: int
    ) -> Iterator[LocalSession]:
        """Start the workers and stop them at the end."""
        from bflcore.engines.pool import crew, single_threaded

        on_cpu = problem.device.type == "cpu"
        tasks = max(1, len(problem.clients))
        count = min(self.workers or (_cores() if on_cpu else 1), tasks)
        chunk = self.chunk or (1 if on_cpu else tasks)
        # One thread a process, this one too: results must not depend on the number of workers,
        # and a server whose threads wait for the workers' cores spins instead of working.
        staff = crew(problem, inference, bins, count, self.client_timeout)
        with single_threaded(), staff as running:
            yield LocalSession(problem, inference, running, chunk, self.memory_limit * 2**20)


class LocalSession(Session):
    """Clients on this machine; memories are kept in this process, or on its disk."""

    def __init__(
        self,
        problem: Problem,
        inference: LocalInference,
        crew: Crew,
        chunk: int,
        limit: float,
    ) -> None:
        self._problem = problem
        self._inference = inference
        self._crew = crew
        self._chunk = chunk
        self._memories = Memories(limit)

    @property
    def memories(self) -> Mapping[int, Memory]:
        """Every memory, by client."""
        return self._memories

    def restore(self, memories: Mapping[int, Memory]) -> None:
        """Store memories of an earlier session."""
        self._memories.update(memories)

    def fit(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[LocalResult | ClientError]:
        """Fit in chunks; see `Session.fit`."""
        tasks = [clients[i : i + self._chunk] for i in range(0, len(clients), self._chunk)]
        for reply in self._crew.run("fit", broadcast, [(c, self._recall(c)) for c in tasks]):
            yield from reply

    def remember(self, result: LocalResult) -> None:
        """Store memories."""
        for row, client in enumerate(result.clients):
            self._memories[client] = {name: t[row] for name, t in result.memory.items()}

    def evaluate(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[Evaluation | ClientError]:
        """Evaluate one client a task; see `Session.evaluate`."""
        tasks = [([client], self._recall([client])) for client in clients]
        for reply in self._crew.run("evaluate", broadcast, tasks):
            yield from reply

    def _recall(self, clients: Sequence[int]) -> list[Memory]:
        missing = [client for client in clients if client not in self._memories]
        fresh = self._inference.initial_memory(self._problem) if missing else {}
        return [self._memories.get(client, fresh) for client in clients]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
