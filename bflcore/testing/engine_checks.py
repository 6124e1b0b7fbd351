"""What an engine must do: what the local one does, and blame the right client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from bflcore.engines.base import Engine, Evaluation
from bflcore.engines.local import Local
from bflcore.errors import ClientError
from bflcore.inference import Broadcast, Cohort, LocalResult, Map
from bflcore.options import component
from bflcore.problem import Problem
from bflcore.testing import small

__all__ = ["FailingEvaluation", "FailingFit", "checks_of"]

Part = type[Engine]

GUILTY = 1
BINS = 10


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of an engine."""
    yield inputs_stay_untouched
    yield from (two_rounds_equal_the_local_engines, evaluation_equals_the_local_engines)
    yield from (replies_are_sorted_by_client, a_client_that_fails_to_fit_is_blamed)
    yield a_client_that_fails_to_evaluate_is_blamed


def inputs_stay_untouched(part: Part) -> None:
    """A round leaves broadcast and data as they were."""
    inference, of = small.made(Map), small.problem(sharing="body")
    broadcast = small.begun(inference, of)
    before = small.copied(broadcast, of.train)
    _fitted(part(), inference, of, rounds=1)
    for thing, copy in zip((broadcast, of.train), before, strict=True):
        small.same(thing, copy, "an input was changed", 0.0)


def two_rounds_equal_the_local_engines(part: Part) -> None:
    """Posteriors, losses and memories of a ragged cohort are those of the local engine."""
    inference, of = small.made(Map), small.problem(sharing="body")
    found, expected = (
        _fitted(engine, inference, of, rounds=2) for engine in (part(), Local(workers=1))
    )
    for client, result in expected.items():
        if client not in found:
            raise AssertionError(f"client {client} did not reply")
        small.same(found[client], result, f"client {client}")


def evaluation_equals_the_local_engines(part: Part) -> None:
    """So are the sums of metrics."""
    inference, of = small.made(Map), small.problem(sharing="body")
    broadcast = small.begun(inference, of)
    sums: list[dict[int, Mapping[str, Tensor]]] = []
    for engine in (part(), Local(workers=1)):
        with engine.open(of, inference, BINS) as session:
            replies = list(session.evaluate(broadcast, of.clients))
        found = [reply for reply in replies if isinstance(reply, Evaluation)]
        sums.append({reply.client: reply.personal for reply in found})
    small.same(
        {str(client): sums[0].get(client, {}) for client in of.clients},
        {str(client): sums[1][client] for client in of.clients},
        "sums of metrics",
    )


def replies_are_sorted_by_client(part: Part) -> None:
    """Replies come in order of ids, whoever was fastest."""
    inference, of = small.made(Map), small.problem()
    with part().open(of, inference, BINS) as session:
        replies = list(session.fit(small.begun(inference, of), of.clients))
    order = [client for reply in replies for client in _clients(reply)]
    if order != sorted(order):
        raise AssertionError(f"replies come in the order {order}")


def a_client_that_fails_to_fit_is_blamed(part: Part) -> None:
    """An exception in `fit` becomes that client's error; the others' results arrive."""
    inference, of = small.made(FailingFit), small.problem()
    with part().open(of, inference, BINS) as session:
        replies = list(session.fit(small.begun(inference, of), of.clients))
    _only_the_guilty(replies, "fit", [0, 2])


def a_client_that_fails_to_evaluate_is_blamed(part: Part) -> None:
    """An exception in `personalise` becomes that client's error."""
    inference, of = small.made(FailingEvaluation), small.problem()
    with part().open(of, inference, BINS) as session:
        replies = list(session.evaluate(small.begun(inference, of), of.clients))
    _only_the_guilty(replies, "evaluate", [0, 2])


@component
class FailingFit(Map):
    """An inference that one client cannot run."""

    name = "failing-fit"

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Raise where the guilty client takes part."""
        if GUILTY in cohort.clients:
            raise RuntimeError("out of luck")
        return super().fit(problem, broadcast, cohort)


@component
class FailingEvaluation(Map):
    """An inference with which one client cannot predict."""

    name = "failing-evaluation"

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Raise where the guilty client takes part."""
        if GUILTY in cohort.clients:
            raise RuntimeError("out of luck")
        return super().personalise(problem, broadcast, cohort, novel)


def _fitted(engine: Engine, inference: Map, of: Problem, rounds: int) -> dict[int, LocalResult]:
    """Return every client's result of the last round, each round starting from client 0's."""
    broadcast = small.begun(inference, of)
    last: dict[int, LocalResult] = {}
    with engine.open(of, inference, BINS) as session:
        for round in range(rounds):
            broadcast = attrs.evolve(broadcast, round=round)
            last = {}
            for reply in session.fit(broadcast, of.clients):
                if isinstance(reply, ClientError):
                    raise AssertionError(f"client {reply.client} failed: {reply}")  # noqa: TRY004
                for row, client in enumerate(reply.clients):
                    last[client] = small.row(reply, row)
                session.remember(reply)
            broadcast = attrs.evolve(broadcast, start=last[0].posterior[0])
    return last


def _clients(reply: Any) -> tuple[int, ...]:
    return (reply.client,) if isinstance(reply, ClientError | Evaluation) else reply.clients


def _only_the_guilty(replies: list[Any], stage: str, innocent: list[int]) -> None:
    errors = [reply for reply in replies if isinstance(reply, ClientError)]
    blamed = [(error.client, error.stage) for error in errors]
    if blamed != [(GUILTY, stage)]:
        raise AssertionError(f"client {GUILTY} failed in {stage}, but blamed are {blamed}")
    if "out of luck" not in errors[0].reason:
        raise AssertionError(f"the reason is lost: {errors[0].reason!r}")
    others = sorted(c for reply in replies if reply not in errors for c in _clients(reply))
    if others != innocent:
        raise AssertionError(f"of the innocent clients {innocent} only {others} replied")
