"""The round loop.

                prior, start  [P]                     posteriors [K, P], statistics
    server  ───────────────────────────►  clients ───────────────────────────────►  server
    hyper.update                          inference.fit           screen, weighting, aggregator

Engines replace the middle arrow and nothing else. What the server keeps between rounds is exactly
what it sends: the `Broadcast`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.aggregation import (
    AdditiveAggregator,
    Aggregator,
    Statistics,
    Weighting,
    check_weights,
)
from bflcore.errors import ClientError, RunError
from bflcore.hyper import HyperUpdate
from bflcore.inference import Broadcast, LocalInference, LocalResult
from bflcore.randomness import SERVER, numpy_stream

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.engines.base import Session
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem

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

    Raises `RunError` when fewer than `min_clients` gave a usable result.
    """
    fusion = Fusion(recipe, broadcast)
    clock = time.perf_counter()
    for reply in session.fit(broadcast, clients):
        arrived = time.perf_counter()
        for accepted in fusion.add(reply):
            session.remember(accepted)
        fusion.server_seconds += time.perf_counter() - arrived
    if len(fusion.replied) < min_clients:
        reasons = "; ".join(str(failure) for failure in fusion.dropped[:3])
        raise RunError(
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

    def __init__(self, recipe: Recipe, broadcast: Broadcast) -> None:
        self.recipe = recipe
        self.broadcast = broadcast
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
        self._hyper: Statistics | None = None

    def add(self, reply: LocalResult | ClientError) -> list[LocalResult]:
        """Take a reply in; return the results that passed the screen, one client each."""
        accepted: list[LocalResult] = []
        for result in screen(reply, self.broadcast):
            if isinstance(result, ClientError):
                self.dropped.append(result)
            else:
                accepted.append(result)
                self._count(result)
                if self._streams:
                    self._fold(result)
                else:
                    self._waiting.append(result)
        return accepted

    def finish(self, client_seconds: float, clients: int) -> Round:
        """Fuse what has been taken in and update the hyperparameters."""
        clock = time.perf_counter()
        fused = self._fuse()
        following = self.recipe.hyper.update(self.broadcast, fused, self._hyper or {})
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

    def _fold(self, result: LocalResult) -> None:
        rule = self.recipe.aggregator
        assert isinstance(rule, AdditiveAggregator)  # noqa: S101 - what streaming requires
        weights = self.recipe.weighting.weigh(result.posterior, result.examples, self.broadcast)
        self._weights.append(weights)  # one number a client, to be checked when all are known
        self._posterior = rule.accumulate(
            self._posterior, result.posterior, weights, self.broadcast.prior
        )
        self._summarise(result, weights)

    def _summarise(self, result: LocalResult, weights: object) -> None:
        sums = self.recipe.hyper.summarise(result, weights, self.broadcast)  # type: ignore[arg-type]
        self._hyper = (
            {name: self._hyper[name] + sums[name] for name in sums} if self._hyper else sums
        )

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
            self._summarise(result, weights[row : row + 1])
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


def screen(
    reply: LocalResult | ClientError, broadcast: Broadcast
) -> Iterator[LocalResult | ClientError]:
    """Yield each client's result alone, or the error that keeps it out of the round."""
    if isinstance(reply, ClientError):
        yield reply
        return
    missing = _missing_rows(reply)
    for row, client in enumerate(reply.clients):
        if missing:
            yield ClientError(client, "fit", missing)
            continue
        result = reply.select([row])
        reason = _fault(result, broadcast)
        yield ClientError(client, "fit", reason) if reason else result


def _missing_rows(reply: LocalResult) -> str:
    """Say which tensor has not one row a client, or return ``""``."""
    tensors = {
        "examples": reply.examples,
        "loss": reply.loss,
        **reply.posterior.pack(),
        **reply.statistics,
        **reply.memory,
    }
    clients = len(reply.clients)
    for name, tensor in tensors.items():
        rows = len(tensor) if tensor.ndim else "no"
        if rows != clients:
            return f"{name} has {rows} rows for {clients} clients"
    return ""


def _fault(result: LocalResult, broadcast: Broadcast) -> str:
    expected = broadcast.start
    if type(result.posterior) is not type(expected):
        return f"posterior is {type(result.posterior).__name__}, not {type(expected).__name__}"
    wanted = expected.pack()
    for name, tensor in result.posterior.pack().items():
        if tensor.shape[1:] != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape[1:])}, "
                f"not {wanted[name].dtype} {list(wanted[name].shape)}"
            )
    if not bool(result.loss.isfinite().all()):
        return f"loss is {float(result.loss[0])}"
    faults = (
        f"{kind} {name} is not finite"
        for kind, tensors in (("statistic", result.statistics), ("memory", result.memory))
        for name, tensor in tensors.items()
        if not bool(tensor.isfinite().all())
    )
    return result.posterior[0].fault() or next(faults, "")


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
