"""What a client keeps from round to round, and the posterior that it predicts with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

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
    "Memory",
    "OwnPosterior",
    "client_posterior",
    "join_personal",
    "keep_own",
    "local_result",
]


@attrs.frozen(eq=False, kw_only=True)
class Memory:
    """What clients keep: each field a tensor or a posterior, of one client or of K ``[K, ...]``.

    An inference that keeps more declares a subclass. Engines store and send the tensors that
    `pack` returns by name; a field that is None is left out.

    Law: ``type(m).unpack(m.pack(), family) == m``.
    """

    personal: Posterior | None = None  # over the personal parameters

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors by name: a posterior's under the names ``field.name``."""
        tensors: dict[str, Tensor] = {}
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                tensors[field.name] = value
            elif value is not None:
                tensors |= value.pack(f"{field.name}.")
        return tensors

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], family: type[Posterior]) -> Self:
        """Rebuild a memory from what `pack` returned; its posteriors are of one `family`."""
        values: dict[str, object] = {}
        for field in attrs.fields(cls):
            posterior = within(tensors, f"{field.name}.")
            values[field.name] = family.unpack(posterior) if posterior else tensors.get(field.name)
        return cls(**values)  # type: ignore[arg-type]


@attrs.frozen(eq=False, kw_only=True)
class OwnPosterior(Memory):
    """The memory of a client that keeps a whole posterior of its own to predict with."""

    own: Posterior | None = None  # over all parameters
    started: Tensor | None = None  # 1 where the client has one, 0 where `own` is still zeros

    @classmethod
    def empty(cls, initial: Posterior) -> Self:
        """Return the memory of one client that has no posterior of its own yet."""
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
    """Return what each client predicts with ``[K, P]``: its own posterior, or else the joined."""
    whole = join_personal(problem, broadcast.start, cohort)
    memory = OwnPosterior.unpack(cohort.memory, type(whole))
    if memory.own is None or memory.started is None:
        return whole
    own, started = memory.own.pack(), memory.started[:, None] > 0
    return whole.unpack(
        {name: torch.where(started, own[name], tensor) for name, tensor in whole.pack().items()}
    )


def keep_own(memory: Mapping[str, Tensor], own: Posterior) -> dict[str, Tensor]:
    """Return memories ``[K, ...]`` in which every client has `own` ``[K, P]``."""
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
    """Divide fitted posteriors ``[K, P]`` into what is shared and what the clients keep.

    `loss` ``[K]``; fields of `memory` ``[K, ...]`` replace those of the cohort's.
    """
    shared, personal = posterior.split(problem.layout)
    kept = Memory(personal=personal).pack() | (memory.pack() if memory else {})
    return LocalResult(
        cohort.clients,
        shared,
        torch.tensor(cohort.sizes),
        loss,
        statistics or {},
        {**cohort.memory, **kept},
    )
