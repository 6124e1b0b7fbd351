"""What a client keeps between rounds, and the posterior with which it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import attrs

from bflcore.lazy import lazy
from bflcore.messages import LocalResult, within

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
else:
    torch = lazy("torch")

__all__ = [
    "COMMON",
    "Memory",
    "OwnPosterior",
    "client_posterior",
    "join_personal",
    "keep_own",
    "local_result",
]


COMMON = "common."  # in `Broadcast.hyper`: the pool of the clients' personal posteriors


@attrs.frozen(eq=False, kw_only=True)
class Memory:
    """What clients keep: each field a tensor or a posterior, of one client or of K ``[K, ...]``.

    An inference that keeps more declares a subclass. Engines store and send the named tensors that
    `pack` returns; fields that are None are left out.

    Law: ``type(m).unpack(m.pack(), family) == m``.
    """

    personal: Posterior | None = None  # over the personal parameters

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors by name; those of a posterior are called ``field.name``."""
        tensors: dict[str, Tensor] = {}
        for name, value in attrs.asdict(self, recurse=False).items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif value is not None:
                tensors |= value.pack(f"{name}.")
        return tensors

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], family: type[Posterior]) -> Self:
        """Rebuild a memory from what `pack` returned; all its posteriors belong to `family`."""
        values: dict[str, Any] = {}
        for name in attrs.fields_dict(cls):
            posterior = within(tensors, f"{name}.")
            values[name] = family.unpack(posterior) if posterior else tensors.get(name)
        return cls(**values)


@attrs.frozen(eq=False, kw_only=True)
class OwnPosterior(Memory):
    """The memory of a client that keeps a posterior of its own over all parameters."""

    own: Posterior | None = None  # with which the client predicts
    started: Tensor | None = None  # 0 until the client has a posterior (`own` is zeros), then 1

    @classmethod
    def empty(cls, initial: Posterior) -> Self:
        """Return the memory of a client that does not have a posterior of its own yet."""
        return cls(own=initial.map(torch.zeros_like), started=initial.mean.new_zeros(()))


def join_personal(problem: Problem, shared: Posterior, cohort: Cohort) -> Posterior:
    """Join the server's posterior ``[P_shared]`` with each client's personal one: ``[K, P]``."""
    batch = shared.map(lambda tensor: tensor.expand(len(cohort.clients), *tensor.shape))
    if not problem.layout.personal_total:
        return batch
    personal = Memory.unpack(cohort.memory, type(shared)).personal
    if personal is None:
        raise KeyError("the clients' memory has no posterior over the personal parameters")
    return batch.join(personal, problem.layout)


def client_posterior(problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Posterior:
    """Return the posterior ``[K, P]`` with which each client predicts.

    Its own if it has one, otherwise the server's joined with its personal one.
    """
    whole = join_personal(problem, broadcast.start, cohort)
    memory = OwnPosterior.unpack(cohort.memory, type(whole))
    if memory.own is None or memory.started is None:
        return whole
    own, started = memory.own.pack(), memory.started > 0
    return whole.unpack(
        {
            name: torch.where(started.view(-1, *(1 for _ in t.shape[1:])), own[name], t)
            for name, t in whole.pack().items()
        }
    )


def keep_own(memory: Mapping[str, Tensor], own: Posterior) -> dict[str, Tensor]:
    """Return the memories ``[K, ...]`` with `own` ``[K, P]`` as each client's posterior."""
    kept = OwnPosterior(own=own, started=own.mean.new_ones(len(own.mean)))
    return {**memory, **kept.pack()}


def local_result(
    problem: Problem,
    cohort: Cohort,
    posterior: Posterior,
    loss: Tensor,
    statistics: Mapping[str, Tensor] | None = None,
    memory: Memory | None = None,
) -> LocalResult:
    """Split fitted posteriors ``[K, P]``: clients send the shared parameters and keep the rest.

    `loss` ``[K]``; fields of `memory` ``[K, ...]`` replace those of the cohort's memory.
    """
    shared, personal = posterior.split(problem.layout)
    kept = {
        **cohort.memory,
        **Memory(personal=personal).pack(),
        **(memory.pack() if memory else {}),
    }
    examples = torch.tensor(cohort.sizes)
    return LocalResult(cohort.clients, shared, examples, loss, statistics or {}, kept)
