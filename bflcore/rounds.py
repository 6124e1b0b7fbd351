"""The round loop.

                prior, start  [P]                     posteriors [K, P], statistics
    server  ───────────────────────────►  clients ───────────────────────────────►  server
    hyper.update                          inference.fit           screen, weighting, aggregator

Engines replace the middle arrow and nothing else. What the server keeps between rounds is exactly
what it sends: the `Broadcast`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.aggregation import AdditiveAggregator, Aggregator, Statistics
from bflcore.engines.screening import screen
from bflcore.errors import ClientError, RoundError
from bflcore.hyper import HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.messages import Broadcast, LocalResult
from bflcore.randomness import SERVER, numpy_stream
from bflcore.weighting import Weighting, check_weights

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.engines.base import Session
    from bflcore.posteriors import Posterior
    from bflcore.problem.base import Problem

__all__ = ["Recipe", "Round", "begin", "run_round", "sample_cohort", "screen"]


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

    `report` holds the aggregator's figures, for example how many coordinates it had to floor.
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


def begin(recipe: Recipe, problem: Problem) -> Broadcast:
    """Return the first broadcast: the shared halves of the initial posterior and of the prior."""
    return Broadcast(
        0,
        recipe.inference.initial(problem).split(problem.layout)[0],
        recipe.inference.prior(problem).split(problem.layout)[0],
    )


def run_round(
    recipe: Recipe,
    session: Session,
    broadcast: Broadcast,
    clients: Sequence[int],
    min_clients: int = 1,
) -> Round:
    """Run one round: send, fit, screen, weigh, fuse, update.

    Raises `RoundError` when fewer than `min_clients` gave a usable result.
    """
    fusion = Fusion(recipe, broadcast, clients)
    clock = time.perf_counter()
    for reply in session.fit(broadcast, clients):
        arrived = time.perf_counter()
        for accepted in fusion.add(reply):
            session.store(accepted)
        fusion.server_seconds += time.perf_counter() - arrived
    if len(fusion.replied) < min_clients:
        reasons = "; ".join(str(failure) for failure in fusion.dropped[:3])
        raise RoundError(
            f"round {broadcast.round + 1}: {len(fusion.replied)} of {len(clients)} clients gave a "
            f"usable result, {min_clients} are needed (--min-clients): {reasons}"
        )
    elapsed = time.perf_counter() - clock - fusion.server_seconds
    return fusion.finish(client_seconds=elapsed, clients=len(clients))


def sample_cohort(clients: Sequence[int], size: int, seed: int, round: int) -> tuple[int, ...]:
    """Draw the round's clients without replacement, in order of their ids."""
    if size >= len(clients):
        return tuple(clients)
    drawn = numpy_stream(seed, round, SERVER, "cohort").choice(len(clients), size, replace=False)
    return tuple(clients[int(i)] for i in sorted(drawn))


class Fusion:
    """The server's half of a round: results go in one at a time, the next broadcast comes out.

    An additive aggregator under a local weighting is folded as results arrive, in memory
    independent of the number of clients; others wait for all of them. Results arrive sorted by
    client, so sums do not depend on who was fastest.
    """

    def __init__(self, recipe: Recipe, broadcast: Broadcast, clients: Sequence[int]) -> None:
        self.recipe = recipe
        self.broadcast = broadcast
        self._expected = set(clients)
        self.replied: list[int] = []
        self.dropped: list[ClientError] = []
        self.server_seconds = 0.0
        self._loss = 0.0
        self._bytes_up = 0
        self._streams = isinstance(recipe.aggregator, AdditiveAggregator) and recipe.weighting.local
        self._waiting: list[LocalResult] = []
        self._weights: list[Tensor] = []
        self._posterior: Statistics = {}
        self._report: dict[str, float] = {}
        self._hyper: Statistics = {}
        self._form: dict[str, object] | None = None

    def add(self, reply: LocalResult | ClientError) -> list[LocalResult]:
        """Take a reply in; return the results that passed the screen, one client each."""
        accepted: list[LocalResult] = []
        for result in screen(reply, self.broadcast):
            if isinstance(result, ClientError):
                self.dropped.append(result)
                continue
            weights = self._weigh(result)
            sums, reason = self._summarised(result, weights)
            if reason:
                self.dropped.append(ClientError(result.clients[0], "fit", reason))
                continue
            accepted.append(result)
            self._count(result)
            if self._streams:
                self._fold(result, weights, sums)
            else:
                self._waiting.append(result)
        return accepted

    def _weigh(self, result: LocalResult) -> Tensor:
        """Return a result's weight ``[1]``; 1 where it takes all results to know it."""
        if not self._streams:
            return result.examples.new_ones(1, dtype=result.loss.dtype)
        return self.recipe.weighting.weigh(result.posterior, result.examples, self.broadcast)

    def _summarised(self, result: LocalResult, weights: Tensor) -> tuple[Statistics, str]:
        """Return what the hyperparameter update sums, and why the result has no place here.

        What it sums must have the form that it has for the round's first client.
        """
        (client,) = result.clients
        if client not in self._expected:
            return {}, "it replied twice" if client in self.replied else "it was not asked"
        self._expected.discard(client)
        try:
            sums = self.recipe.hyper.summarise(result, weights, self.broadcast)
        except Exception as error:  # noqa: BLE001 - whatever a malformed statistic causes
            return {}, f"its statistics do not fit ({type(error).__name__}: {error})"
        form: dict[str, object] = {
            name: (list(tensor.shape), tensor.dtype) for name, tensor in sums.items()
        }
        self._form = form if self._form is None else self._form
        if form != self._form:
            return {}, f"its statistics are {form}, not {self._form} as client {self.replied[0]}'s"
        return sums, ""

    def finish(self, client_seconds: float, clients: int) -> Round:
        """Fuse what has been taken in and update the hyperparameters."""
        clock = time.perf_counter()
        fused = self._fuse()
        following = self.recipe.hyper.update(self.broadcast, fused, self._hyper)
        seconds = self.server_seconds + time.perf_counter() - clock
        return Round(
            following,
            self._loss / len(self.replied),
            tuple(self.replied),
            tuple(self.dropped),
            self._bytes_up,
            clients * _bytes_down(self.broadcast),
            client_seconds,
            seconds,
            self._report,
        )

    def _count(self, result: LocalResult) -> None:
        self.replied.append(result.clients[0])
        self._loss += float(result.loss[0])
        tensors = [*result.posterior.pack().values(), *result.statistics.values()]
        self._bytes_up += sum(tensor.nbytes for tensor in tensors)

    def _fold(self, result: LocalResult, weights: Tensor, sums: Statistics) -> None:
        rule = self.recipe.aggregator
        assert isinstance(rule, AdditiveAggregator)  # noqa: S101 - what streaming requires
        self._weights.append(weights)  # one number a client, to be checked when all are known
        self._posterior = rule.accumulate(
            self._posterior, result.posterior, weights, self.broadcast.prior
        )
        self._sum(sums)

    def _sum(self, sums: Statistics) -> None:
        self._hyper = {
            name: self._hyper[name] + t if self._hyper else t for name, t in sums.items()
        }

    def _fuse(self) -> Posterior:
        import torch

        if self._streams:
            check_weights(torch.cat(self._weights), len(self.replied), self.replied)
            return self._decode()
        rule, prior = self.recipe.aggregator, self.broadcast.prior
        posteriors = type(prior).concatenate([result.posterior for result in self._waiting])
        examples = torch.cat([result.examples for result in self._waiting])
        weights = self.recipe.weighting.weigh(posteriors, examples, self.broadcast)
        for row, result in enumerate(self._waiting):
            self._sum(self.recipe.hyper.summarise(result, weights[row : row + 1], self.broadcast))
        check_weights(weights, len(self.replied), self.replied)
        if not isinstance(rule, AdditiveAggregator):
            return rule.fuse(posteriors, weights, prior)
        self._posterior = rule.encode(posteriors, weights, prior)
        return self._decode()

    def _decode(self) -> Posterior:
        rule, prior = self.recipe.aggregator, self.broadcast.prior
        assert isinstance(rule, AdditiveAggregator)  # noqa: S101 - what sums are taken for
        self._report = rule.report(self._posterior, prior)
        return rule.decode(self._posterior, prior)


def _bytes_down(broadcast: Broadcast) -> int:
    """Bytes sent to one client: the start, the prior where it differs, and the hyperparameters.

    Values are compared, not objects: a broadcast read from a checkpoint shares no memory.
    """
    start, prior = broadcast.start.pack(), broadcast.prior.pack()
    tensors: Iterable[object] = (
        *start.values(),
        *(tensor for name, tensor in prior.items() if not tensor.equal(start[name])),
        *broadcast.hyper.values(),
    )
    return sum(tensor.nbytes for tensor in tensors)  # type: ignore[attr-defined]
