"""What a client keeps from round to round: its personal posterior, or a whole one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bflcore.lazy import lazy
from bflcore.messages import LocalResult

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Cohort
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
else:
    torch = lazy("torch")

__all__ = [
    "OWN",
    "PERSONAL",
    "STARTED",
    "client_posterior",
    "join_personal",
    "keep_own",
    "local_result",
    "no_own",
]

PERSONAL = "personal."  # prefix, in a client's memory, of its posterior over personal parameters


def join_personal(
    problem: Problem, shared: Posterior, memory: Mapping[str, Tensor], clients: int
) -> Posterior:
    """Join the server's coordinates ``[P_shared]`` with each client's own: ``[K, P]``."""
    batch = shared.map(lambda tensor: tensor.expand(clients, *tensor.shape))
    if not problem.layout.personal_total:
        return batch
    return batch.join(type(shared).unpack(memory, PERSONAL), problem.layout)


# A client may keep a posterior of its own over all coordinates: its fields under this prefix, and
# whether (1) or not (0) it has one yet. Then it predicts with that one.
OWN, STARTED = "own.", "own-started"


def no_own(initial: Posterior) -> dict[str, Tensor]:
    """Return the memory of one client that has no posterior of its own yet."""
    zeros = initial.map(torch.zeros_like)
    return {**zeros.pack(OWN), STARTED: initial.mean.new_zeros(())}


def keep_own(memory: Mapping[str, Tensor], own: Posterior) -> dict[str, Tensor]:
    """Return memories in which every client has `own` ``[K, P]``."""
    return {**memory, **own.pack(OWN), STARTED: own.mean.new_ones(len(own.mean))}


def client_posterior(
    problem: Problem, shared: Posterior, memory: Mapping[str, Tensor], clients: int
) -> Posterior:
    """Return what each client predicts with ``[K, P]``: its own posterior, or else the joined."""
    whole = join_personal(problem, shared, memory, clients)
    if STARTED not in memory:
        return whole
    own = type(shared).unpack(memory, OWN).pack()
    started = memory[STARTED][:, None] > 0
    return whole.unpack(
        {name: torch.where(started, own[name], tensor) for name, tensor in whole.pack().items()}
    )


def local_result(
    problem: Problem,
    cohort: Cohort,
    posterior: Posterior,
    loss: Tensor,
    statistics: Mapping[str, Tensor] | None = None,
) -> LocalResult:
    """Divide fitted posteriors ``[K, P]`` into what travels and what is remembered."""
    shared, personal = posterior.split(problem.layout)
    return LocalResult(
        cohort.clients,
        shared,
        torch.tensor(cohort.sizes),
        loss,
        statistics or {},
        {**cohort.memory, **personal.pack(PERSONAL)},
    )
