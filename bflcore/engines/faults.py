"""Simulated faults: clients that never reply, and clients that send garbage.

Who fails, when and how is drawn from streams of the run's seed: a study of robustness can be
repeated, and a resumed run meets the same faults.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.engines.base import Session, Wrapped
from bflcore.errors import ClientError
from bflcore.randomness import numpy_stream

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from bflcore.engines.base import FitReply
    from bflcore.messages import Broadcast, LocalResult

__all__ = ["GARBAGE", "Unreliable", "simulate_faults"]

HUGE = 1e30


POSITIVE = ("variance", "precision")  # how names of such fields end

# What a corrupted client does to each tensor of its posterior. The last is for families that have
# a variance or a precision.
GARBAGE: dict[str, Callable[[str, Tensor], Tensor]] = {
    "not a number": lambda _, tensor: tensor * float("nan"),
    "wrong shape": lambda _, tensor: tensor.repeat_interleave(2, dim=-1),
    "huge": lambda _, tensor: tensor.sign() * HUGE + HUGE,
    "negative variance": lambda name, t: -1 - t.abs() if name.endswith(POSITIVE) else t,
}


def simulate_faults(session: Session, seed: int, drop_out: float, corrupt: float) -> Session:
    """Return the session, wrapped where one of the probabilities is above 0."""
    return Unreliable(session, seed, drop_out, corrupt) if drop_out or corrupt else session


@attrs.frozen(eq=False)
class Unreliable(Wrapped):
    """A session whose clients fail at random in training; evaluation reaches every client."""

    seed: int
    drop_out: float
    corrupt: float

    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        """Fit the clients that did not drop out; corrupt the results of some."""
        lost = [c for c in clients if self._draw(broadcast, c, "drop-out").random() < self.drop_out]
        errors = (ClientError(client, "fit", "it dropped out (--drop-out)") for client in lost)
        others = [client for client in clients if client not in lost]
        replies = self._replies(broadcast, others) if others else iter(())
        yield from heapq.merge(
            errors, replies, key=lambda r: r.client if isinstance(r, ClientError) else r.clients[0]
        )

    def _replies(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        for reply in self.session.fit(broadcast, clients):
            if isinstance(reply, ClientError):
                yield reply
                continue
            for row, client in enumerate(reply.clients):
                draw = self._draw(broadcast, client, "corruption")
                alone = reply.select([row])
                yield _corrupt(alone, draw) if draw.random() < self.corrupt else alone

    def _draw(self, broadcast: Broadcast, client: int, purpose: str) -> np.random.Generator:
        return numpy_stream(self.seed, broadcast.round, client, purpose)


def _corrupt(result: LocalResult, draw: np.random.Generator) -> LocalResult:
    packed = result.posterior.pack()
    kinds = list(GARBAGE.values())
    if not any(name.endswith(POSITIVE) for name in packed):
        kinds.pop()
    corrupt = kinds[int(draw.integers(len(kinds)))]
    posterior = result.posterior.unpack({name: corrupt(name, t) for name, t in packed.items()})
    return attrs.evolve(result, posterior=posterior)
