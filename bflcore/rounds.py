"""The round loop.

                prior, start  [P]                     posteriors [K, P], statistics
    server  ───────────────────────────►  clients ───────────────────────────────►  server
    hyper.update                          inference.fit           screen, weighting, aggregator

Engines replace the middle arrow and nothing else. What the server keeps between rounds is exactly
what it sends: the `Broadcast`. What clients answer before round 1 and after the last one is in
`bflcore.experiments.surveys`.

A *block* is a fixed number of consecutive clients of the sorted cohort. Its clients are added in
order, and the sums of blocks are merged in order: wherever a block is summed, and however many
workers or edge servers there are, the result is the same to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Self

import attrs

from bflcore.aggregation import Aggregator, State, Statistics, add_sums
from bflcore.engines.screening import screen, screen_fused
from bflcore.engines.trust import Standing, TrustRegion
from bflcore.errors import ClientError, RoundError, blamed
from bflcore.hyper import HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.lazy import lazy
from bflcore.messages import REPORTED, SURVEY, Broadcast, LocalResult, nbytes, within
from bflcore.randomness import SERVER, numpy_stream
from bflcore.weighting import Weighting, check_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.engines.base import Session
    from bflcore.posteriors import Posterior
    from bflcore.problem.base import Problem
else:
    torch = lazy("torch")

__all__ = [
    "BLOCK",
    "Recipe",
    "Round",
    "Sums",
    "begin",
    "run_round",
    "sample_cohort",
]

BLOCK = 32  # clients per block


@attrs.frozen
class Recipe:
    """The five parts (the posterior family comes with the inference)."""

    inference: LocalInference
    aggregator: Aggregator
    weighting: Weighting
    hyper: HyperUpdate


@attrs.frozen(eq=False)
class Round:
    """What one round produced: the next broadcast, and its record.

    `report` holds numbers of the parts, for example `aggregator.floored`: how many coordinates it
    had to floor. `heaviest` is the client with the largest weight, and its share of all weight;
    `standing` is what the server now remembers of the clients.
    """

    broadcast: Broadcast
    loss: float
    replied: tuple[int, ...]
    dropped: tuple[ClientError, ...]
    bytes_up: int
    bytes_down: int
    client_seconds: float
    server_seconds: float
    report: Mapping[str, float] = attrs.field(factory=dict)
    heaviest: tuple[int, float] = (SERVER, 0.0)
    standing: Standing = attrs.field(factory=Standing)


@attrs.frozen(eq=False)
class Sums:
    """What the server needs of some clients: the aggregator's state and the sums for `hyper`."""

    state: State
    hyper: Statistics = attrs.field(factory=dict)

    def add(
        self, rule: Aggregator, result: LocalResult, weights: Tensor, hyper: Statistics
    ) -> Sums:
        """Return the sums with one more client in them; `self` may be overwritten."""
        state = rule.add(self.state, result.posterior, weights)
        return Sums(state, add_sums(self.hyper, hyper))

    def merge(self, rule: Aggregator, later: Sums) -> Sums:
        """Return the sums of these clients and of those that come after them."""
        return Sums(rule.merge(self.state, later.state), add_sums(self.hyper, later.hyper))

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors ``[...]`` by name: all that a worker or an edge server sends."""
        return {
            **{f"state.{name}": tensor for name, tensor in self.state.tensors.items()},
            **{f"hyper.{name}": tensor for name, tensor in self.hyper.items()},
        }

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], prior: Posterior) -> Self:
        """Rebuild sums from the tensors ``[...]`` of `pack` and the broadcast's prior."""
        return cls(State(prior, within(tensors, "state.")), within(tensors, "hyper."))


def begin(recipe: Recipe, problem: Problem) -> Broadcast:
    """Return the first broadcast: the shared halves of the initial posterior and of the prior."""
    prior = recipe.inference.prior(problem).split(problem.layout)[0]
    return Broadcast(
        0,
        recipe.inference.initial(problem).split(problem.layout)[0],
        prior,
        {f"{SURVEY}{name}": tensor for name, tensor in problem.survey.items()},
        prior,
    )


def sample_cohort(
    clients: Sequence[int], size: int, seed: int, round: int, purpose: str = "cohort"
) -> tuple[int, ...]:
    """Draw the round's clients without replacement, in order of their ids."""
    if size >= len(clients):
        return tuple(clients)
    drawn = numpy_stream(seed, round, SERVER, purpose).choice(len(clients), size, replace=False)
    return tuple(clients[int(i)] for i in sorted(drawn))


def run_round(
    recipe: Recipe,
    session: Session,
    broadcast: Broadcast,
    clients: Sequence[int],
    min_clients: int = 1,
    block: int = BLOCK,
    trust: float = 0.0,
    standing: Standing | None = None,
) -> Round:
    """Run one round: send, fit, screen, weigh, sum block by block, fuse, update.

    `trust` is the factor of the trust region (`TrustRegion`; 0: everybody is trusted), and
    `standing` what the server remembers of the clients. Memory does not depend on the number of
    clients where the aggregator sums and the weighting is `local`: the results of one block are
    held at a time. Raises `RoundError` if fewer than `min_clients` give a valid result, or if a
    part of the server fails or gives a posterior that is invalid: then the broadcast is as it was.
    """
    clock, rule, number = time.perf_counter(), recipe.aggregator, broadcast.round + 1
    tally = Tally(broadcast, clients)
    block_of = {client: rank // block for rank, client in enumerate(sorted(clients))}
    sites = "conserves-evidence" in recipe.inference.tags
    region = TrustRegion(broadcast, trust, standing, sites=sites)
    arrivals = tally.screen(session.fit(broadcast, clients), region, block_of)
    weighed = recipe.weighting.weigh_each(arrivals, broadcast)
    total = Sums(rule.start(broadcast.prior))
    for _, members in groupby(weighed, key=lambda member: block_of[member[0].clients[0]]):
        part = Sums(rule.start(broadcast.prior))
        for result, weights in members:
            summary = tally.summarise(recipe.hyper, result, weights)
            if summary is not None:
                with blamed(rule, number):
                    part = part.add(rule, result, weights, summary)
                session.store(result)
        with blamed(rule, number):
            total = total.merge(rule, part)
    tally.check(min_clients)
    if not tally.replied:
        done = tally.pass_over(time.perf_counter() - clock)
        return attrs.evolve(done, standing=region.standing)
    with blamed(rule, number):
        posterior = rule.finish(total.state)
        report = {f"aggregator.{name}": n for name, n in rule.report(total.state).items()}
        screen_fused(rule, posterior, broadcast.start, number)
    with blamed(recipe.hyper, number):
        following = broadcast.followed_by(recipe.hyper.update(broadcast, posterior, total.hyper))
        screen_fused(recipe.hyper, following.start, broadcast.start, number)
        screen_fused(recipe.hyper, following.prior, broadcast.prior, number)
    done = tally.close(following, report, time.perf_counter() - clock)
    return attrs.evolve(done, standing=region.standing)


class Tally:
    """Who replied to a round and who was dropped and why; bytes, seconds and loss.

    `replied` and `dropped` are in order of arrival; `weights` ``[1]`` are those of the clients
    that replied.
    """

    def __init__(self, broadcast: Broadcast, clients: Sequence[int]) -> None:
        self.broadcast = broadcast
        self.clients = frozenset(clients)
        self.seen: set[int] = set()
        self.replied: list[int] = []
        self.dropped: list[ClientError] = []
        self.weights: list[Tensor] = []
        self.loss = 0.0
        self.bytes_up = 0
        self.client_seconds = 0.0
        self.reported: dict[str, float] = {}

    def screen(
        self,
        replies: Iterable[LocalResult | ClientError],
        region: TrustRegion,
        block_of: Mapping[int, int],
    ) -> Iterator[LocalResult]:
        """Yield the results that are valid and within the trust region, one client each."""
        valid = self._valid(replies)
        for _, members in groupby(valid, key=lambda result: block_of[result.clients[0]]):
            for result in region.admit(members):
                if isinstance(result, ClientError):
                    self.dropped.append(result)
                else:
                    yield result

    def _valid(self, replies: Iterable[LocalResult | ClientError]) -> Iterator[LocalResult]:
        """Yield the valid results of clients that were asked, one client each, as they arrive."""
        arriving = iter(replies)
        while True:
            clock = time.perf_counter()
            try:
                reply = next(arriving)
            except StopIteration:
                return
            finally:
                self.client_seconds += time.perf_counter() - clock
            self.bytes_up += _uploaded(reply)
            for result in screen(reply, self.broadcast):
                if isinstance(result, ClientError):
                    self.dropped.append(result)
                    continue
                (client,) = result.clients
                if client not in self.clients:
                    self.drop(client, "it was not asked")
                elif client in self.seen:
                    self.drop(client, "it replied twice")
                else:
                    self.seen.add(client)
                    yield result

    def summarise(
        self, hyper: HyperUpdate, result: LocalResult, weights: Tensor
    ) -> Statistics | None:
        """Count the client and return the statistics that `hyper` sums; None if it is dropped."""
        (client,) = result.clients
        try:
            sums = hyper.summarise(result, weights, self.broadcast)
        except Exception as error:  # noqa: BLE001 - whatever a malformed statistic causes
            self.drop(client, f"its statistics do not fit ({type(error).__name__}: {error})")
            return None
        self.replied.append(client)
        self.weights.append(weights)  # one number per client, checked when all are known
        self.loss += float(result.loss[0])
        for name, value in within(result.statistics, REPORTED).items():
            full = f"inference.{name}"
            self.reported[full] = self.reported.get(full, 0.0) + float(value.sum())
        return sums

    def drop(self, client: int, reason: str) -> None:
        """Leave a client out of the round."""
        self.dropped.append(ClientError(client, "fit", reason))

    def check(self, min_clients: int) -> None:
        """Raise if too few clients gave a valid result, or if their weights are invalid."""
        if len(self.replied) < min_clients:
            reasons = "; ".join(str(failure) for failure in self.dropped[:3])
            raise RoundError(
                f"round {self.broadcast.round + 1}: {len(self.replied)} of {len(self.clients)} "
                f"clients gave a valid result, {min_clients} are needed (--min-clients): "
                f"{reasons}; to go on with fewer, set min_clients in the run's experiment.toml"
            )
        if self.replied:
            check_weights(torch.cat(self.weights), len(self.replied), self.replied)

    def pass_over(self, seconds: float) -> Round:
        """Return the record of a round without a valid result: the posterior stays as it was."""
        following = attrs.evolve(self.broadcast, round=self.broadcast.round + 1)
        return self.close(following, {}, seconds)

    def close(self, following: Broadcast, report: Mapping[str, float], seconds: float) -> Round:
        """Return the round's record; `seconds` is all the time that it took."""
        return Round(
            following,
            self.loss / len(self.replied) if self.replied else float("nan"),
            tuple(self.replied),
            tuple(self.dropped),
            self.bytes_up,
            len(self.clients) * nbytes(self.broadcast.sent()),
            self.client_seconds,
            seconds - self.client_seconds,
            {**report, **self.reported},
            self._heaviest(),
        )

    def _heaviest(self) -> tuple[int, float]:
        if not self.replied:
            return SERVER, 0.0
        weights = torch.cat(self.weights)
        row = int(weights.argmax())
        return self.replied[row], float(weights[row] / weights.sum())


def _uploaded(reply: LocalResult | ClientError) -> int:
    """Return the bytes of a result, whether or not it is valid."""
    if isinstance(reply, ClientError):
        return 0
    try:
        return nbytes(reply.posterior.without_structure()) + nbytes(reply.statistics)
    except Exception:  # noqa: BLE001 - a client may send anything; the screen says what
        return 0
