"""The law of evidence: whatever happens to a run, every client's data are in the posterior once.

    q = p0 prod_k t_k

q is the server's posterior, p0 the first prior, and t_k the site that client k keeps. A history is
a list of rounds, each of which says who took part, whose reply was lost or refused, and whether the
process was killed before the round was saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bflcore.aggregation import Aggregator, ProductOfChanges
from bflcore.engines.base import Session, Wrapped
from bflcore.engines.local import Local
from bflcore.errors import ClientError
from bflcore.hyper import Continual, HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.inference.sites import SiteMemory, exact_natural
from bflcore.messages import Broadcast, LocalResult
from bflcore.problem.base import Problem
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing import problems
from bflcore.weighting import Equal

if TYPE_CHECKING:
    from bflcore.engines.base import FitReply

__all__ = ["FATES", "Event", "assert_conserved", "evidence_is_conserved", "live_through"]

Part = type[LocalInference]
Memories = dict[int, Mapping[str, Tensor]]

# What can happen to a client in a round. A lost reply is one that the client sent in vain; a
# refused one has arrived, and is not a posterior.
FATES = ("replies", "absent", "lost", "refused")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
ROUNDS = 8


@attrs.frozen
class Event:
    """One round: each client's fate, and whether all of it is lost because the process is killed.

    A killed run goes on from the end of the round before.
    """

    fates: tuple[str, ...]
    killed: bool = False


@attrs.frozen(eq=False)
class Troubled(Wrapped):
    """A session in which replies are lost or spoilt, as an event says."""

    event: Event

    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        """Fit all clients; hand over what arrives."""
        for reply in self.session.fit(broadcast, clients):
            for one in [reply] if isinstance(reply, ClientError) else _alone(reply):
                client = one.client if isinstance(one, ClientError) else one.clients[0]
                yield self._arrives(one, self.event.fates[client])

    def _arrives(self, reply: FitReply, fate: str) -> FitReply:
        if isinstance(reply, ClientError) or fate == "replies":
            return reply
        if fate == "lost":
            return ClientError(reply.clients[0], "fit", "its reply was lost")
        spoilt = reply.posterior.map(lambda tensor: tensor * float("nan"))
        return attrs.evolve(reply, posterior=spoilt)


def _alone(reply: LocalResult) -> list[LocalResult]:
    return [reply.select([row]) for row in range(len(reply.clients))]


def evidence_is_conserved(part: Part) -> None:
    """The posterior is the prior times the clients' sites, after any history."""
    inference = problems.build(part)
    for dtype in TOLERANCE:
        of = problems.separable(sharing="body", dtype=dtype)
        of = problems.surveyed(inference, of)
        for seed in (0, 1):
            assert_conserved(inference, of, _history(seed))


def assert_conserved(
    inference: LocalInference,
    of: Problem,
    history: Sequence[Event],
    aggregator: Aggregator | None = None,
    hyper: HyperUpdate | None = None,
) -> None:
    """Require, after every round of a history, that q = p0 prod t_k to rounding.

    Raises `AssertionError` with the first natural parameter in which they differ.
    """
    recipe = Recipe(inference, aggregator or ProductOfChanges(), Equal(), hyper or Continual())
    first = begin(recipe, of).prior
    tolerance = TOLERANCE[of.initial.dtype]
    for number, (broadcast, memories) in enumerate(live_through(recipe, of, history)):
        product = exact_natural(first)
        size = {name: tensor.abs() for name, tensor in product.items()}
        for memory in memories.values():
            for name, tensor in SiteMemory.unpack(memory, type(first)).site.items():
                product[name] = product[name] + tensor
                size[name] = size[name] + tensor.abs()
        for name, found in exact_natural(broadcast.start if number else broadcast.prior).items():
            apart = (found - product[name]).abs()
            wrong = apart > tolerance * (size[name] + size[name].mean())
            if bool(wrong.any()):
                where = tuple(wrong.nonzero()[0].tolist())
                raise AssertionError(
                    f"after {number} rounds ({history[number - 1]}) the posterior's {name}"
                    f"{list(where)} is {float(found[where]):.9g}, the prior's and the clients' "
                    f"sites' add up to {float(product[name][where]):.9g}: keep what a client "
                    "contributed in its SiteMemory, and change both by the same factor"
                )


def live_through(
    recipe: Recipe, of: Problem, history: Sequence[Event]
) -> Iterator[tuple[Broadcast, Memories]]:
    """Yield what the server holds, and what every client keeps, before and after each round."""
    saved: tuple[Broadcast, Memories] = begin(recipe, of), {}
    yield saved
    for event in history:
        with Local(workers=1).open(of, recipe.inference, bins=1) as session:
            session.restore(saved[1])
            after = _round(recipe, session, saved[0], event)
        saved = saved if event.killed else after
        yield saved


def _round(
    recipe: Recipe, session: Session, broadcast: Broadcast, event: Event
) -> tuple[Broadcast, Memories]:
    asked = [client for client, fate in enumerate(event.fates) if fate != "absent"]
    done = run_round(recipe, Troubled(session, event), broadcast, asked, min_clients=0)
    return done.broadcast, {client: dict(session.memories[client]) for client in session.memories}


def _history(seed: int) -> list[Event]:
    """Return rounds in which anything happens."""
    noise = problems.generator(seed)

    def drawn(upper: int) -> int:
        return int(torch.randint(upper, (), generator=noise))

    everybody = Event(("replies",) * len(problems.SIZES))
    return [
        everybody,
        *(
            Event(tuple(FATES[drawn(len(FATES))] for _ in problems.SIZES), killed=not drawn(5))
            for _ in range(ROUNDS)
        ),
    ]
