"""The survey, the round loop and the calibration.

                prior, start  [P]                     posteriors [K, P], statistics
    server  ───────────────────────────►  clients ───────────────────────────────►  server
    hyper.update                          inference.fit           screen, weighting, aggregator

Engines replace the middle arrow and nothing else. What the server keeps between rounds is exactly
what it sends: the `Broadcast`. Before round 1 it knows of the data what the *survey* tells it: sums
over clients. After the last round, calibrators get sums over samples that nobody trained on.

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
from bflcore.engines.screening import screen, screen_answer, screen_fused
from bflcore.engines.trust import TrustRegion
from bflcore.errors import ClientError, RoundError, blamed
from bflcore.hyper import HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.lazy import lazy
from bflcore.messages import CALIBRATION, SURVEY, Broadcast, Cohort, LocalResult, within
from bflcore.problem.calibration.base import ANSWERED
from bflcore.problem.scaling import moments
from bflcore.randomness import SERVER, numpy_stream
from bflcore.weighting import Weighting, check_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.engines.base import Session
    from bflcore.messages import Answer
    from bflcore.posteriors import Posterior
    from bflcore.problem.base import Problem
else:
    torch = lazy("torch")

__all__ = [
    "BLOCK",
    "Recipe",
    "Round",
    "Sums",
    "Survey",
    "begin",
    "calibrate",
    "run_round",
    "sample_cohort",
    "survey",
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

    `report` holds the aggregator's numbers, for example how many coordinates it had to floor;
    `heaviest` is the client with the largest weight, and its share of all weight; `reported` is how
    many samples each client said it has, the first time that it was trusted.
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
    reported: Mapping[int, int] = attrs.field(factory=dict)


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


@attrs.frozen(eq=False)
class Survey:
    """What clients answered: the sums ``[...]`` by name, who was left out, and what was sent.

    `reported` are the numbers of samples by client, where an answer holds them.
    """

    sums: Mapping[str, Tensor]
    dropped: tuple[ClientError, ...]
    bytes_up: int
    bytes_down: int
    reported: Mapping[int, int] = attrs.field(factory=dict)


def survey(
    inference: LocalInference, problem: Problem, session: Session, min_clients: int = 1
) -> Survey:
    """Add up the clients' answers before round 1.

    If samples are to be standardised, the clients are asked for their moments first, and then
    `LocalInference.survey` sees standardised samples. Raises `RoundError` if fewer than
    `min_clients` give a valid answer.
    """
    sums: dict[str, Tensor] = {}
    dropped: list[ClientError] = []
    up = down = 0
    clients = problem.clients
    reported: dict[int, int] = {}
    for form in _forms(inference, problem):
        down += len(clients) * _nbytes(sums)
        found, answered = _add_up(session.survey(sums, clients), clients, form, "survey")
        dropped += found.dropped
        up += found.bytes_up
        reported |= found.reported
        if len(answered) < min_clients:
            raise _too_few("before round 1", "survey", answered, clients, min_clients, dropped)
        sums |= found.sums
    return Survey(sums, tuple(dropped), up, down, reported)


def calibrate(
    problem: Problem, session: Session, broadcast: Broadcast, min_clients: int = 1
) -> tuple[Broadcast, Survey]:
    """Add up the clients' sums over calibration samples after the last round.

    Returns the broadcast with the total, and with the clients that are in it, and what it cost.
    Raises `RoundError` if fewer than `min_clients` give a valid answer.
    """
    clients, form = problem.clients, problem.uncalibrated()
    found, answered = _add_up(session.calibrate(broadcast, clients), clients, form, "calibrate")
    if len(answered) < min_clients:
        when = f"after round {broadcast.round}"
        raise _too_few(when, "calibration", answered, clients, min_clients, found.dropped)
    total = {**found.sums, ANSWERED: torch.tensor(answered, device=problem.device)}
    hyper = {**broadcast.hyper, **{f"{CALIBRATION}{name}": t for name, t in total.items()}}
    down = len(clients) * _nbytes(broadcast.sent())
    return attrs.evolve(broadcast, hyper=hyper), attrs.evolve(found, bytes_down=down)


def _add_up(
    replies: Iterable[Answer | ClientError],
    asked: Sequence[int],
    form: Mapping[str, Tensor],
    stage: str,
) -> tuple[Survey, list[int]]:
    """Return the sum of the valid answers, which have this form, and whose they are.

    Those of clients that were not asked are left out, and all but the first of a client's.
    """
    known = frozenset(asked)
    dropped: list[ClientError] = []
    answered: dict[int, None] = {}  # in order of arrival
    total: Statistics = {}
    reported: dict[int, int] = {}
    up = 0
    for reply in replies:
        answer = screen_answer(reply, form, stage)
        if isinstance(answer, ClientError):
            dropped.append(answer)
            continue
        if answer.client not in known or answer.client in answered:
            reason = "it answered twice" if answer.client in answered else "it was not asked"
            dropped.append(ClientError(answer.client, stage, reason))
            continue
        up += _nbytes(answer.sums)
        answered[answer.client] = None
        if "examples" in answer.sums:
            reported[answer.client] = int(answer.sums["examples"])
        total = add_sums(total, dict(answer.sums))
    return Survey(total, tuple(dropped), up, 0, reported), list(answered)


def _too_few(
    when: str,
    asked: str,
    answered: Sequence[int],
    clients: Sequence[int],
    due: int,
    dropped: Sequence[ClientError],
) -> RoundError:
    return RoundError(
        f"{when}: {len(answered)} of {len(clients)} clients answered the {asked}, {due} are needed "
        f"(--min-clients): {'; '.join(map(str, dropped[:3]))}"
    )


def _forms(inference: LocalInference, problem: Problem) -> list[dict[str, Tensor]]:
    """Return the form of each answer ``[...]`` that the clients are asked for, in order."""
    x, y = problem.train.x[:0], problem.train.y[:0]
    nobody = Cohort((SERVER,), x[None], y[None], (0,), {}, problem.seed, 0)
    asked = {name: t[0] for name, t in inference.survey(problem, nobody).items()}
    return [moments(x, y, problem.indicators), asked] if problem.standardise else [asked]


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


def sample_cohort(clients: Sequence[int], size: int, seed: int, round: int) -> tuple[int, ...]:
    """Draw the round's clients without replacement, in order of their ids."""
    if size >= len(clients):
        return tuple(clients)
    drawn = numpy_stream(seed, round, SERVER, "cohort").choice(len(clients), size, replace=False)
    return tuple(clients[int(i)] for i in sorted(drawn))


def run_round(
    recipe: Recipe,
    session: Session,
    broadcast: Broadcast,
    clients: Sequence[int],
    min_clients: int = 1,
    block: int = BLOCK,
    trust: float = 0.0,
    reported: Mapping[int, int] | None = None,
) -> Round:
    """Run one round: send, fit, screen, weigh, sum block by block, fuse, update.

    `trust` is the factor of the trust region (`TrustRegion`; 0: everybody is trusted), and
    `reported` the numbers of samples that clients gave before, by client. Memory does
    not depend on the number of clients where the aggregator sums and the weighting is `local`: the
    results of one block are held at a time. Raises `RoundError` if fewer than `min_clients` give a
    valid result, or if a part of the server fails or gives a posterior that is invalid: then the
    broadcast is as it was.
    """
    clock, rule, number = time.perf_counter(), recipe.aggregator, broadcast.round + 1
    tally = Tally(broadcast, clients)
    block_of = {client: rank // block for rank, client in enumerate(sorted(clients))}
    region = TrustRegion(broadcast, trust, reported)
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
        return attrs.evolve(done, reported=region.reported)
    with blamed(rule, number):
        posterior, report = rule.finish(total.state), rule.report(total.state)
        screen_fused(rule, posterior, broadcast.start, number)
    with blamed(recipe.hyper, number):
        following = broadcast.followed_by(recipe.hyper.update(broadcast, posterior, total.hyper))
        screen_fused(recipe.hyper, following.start, broadcast.start, number)
        screen_fused(recipe.hyper, following.prior, broadcast.prior, number)
    done = tally.close(following, report, time.perf_counter() - clock)
    return attrs.evolve(done, reported=region.reported)


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
            reply = next(arriving, None)
            self.client_seconds += time.perf_counter() - clock
            if reply is None:
                return
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
                f"clients gave a valid result, {min_clients} are needed (--min-clients): {reasons}"
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
            len(self.clients) * _nbytes(self.broadcast.sent()),
            self.client_seconds,
            seconds - self.client_seconds,
            report,
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
        return _nbytes(reply.posterior.pack()) + _nbytes(reply.statistics)
    except Exception:  # noqa: BLE001 - a client may send anything; the screen says what
        return 0


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
