"""Checks of engines: results equal the local engine's, and errors name the right client.

Opening an engine may take long (processes, nodes), so all checks share one recorded session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import attrs
from torch import Tensor

from bflcore.engines.base import Engine, Session
from bflcore.engines.local import Local
from bflcore.errors import ClientError
from bflcore.inference.point import Map
from bflcore.messages import Answer, Broadcast, Cohort, Evaluation, LocalResult
from bflcore.options import component
from bflcore.problem.base import Problem
from bflcore.testing import problems

__all__ = ["Faulty", "checks_of"]

Part = type[Engine]

GUILTY = 1
FAULTY_ROUND = 9
BINS = 10


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of an engine."""
    yield from (inputs_stay_untouched, answers_equal_the_local_engines)
    yield from (two_rounds_equal_the_local_engines, evaluation_equals_the_local_engines)
    yield from (replies_are_sorted_by_client, a_client_that_fails_to_fit_is_blamed)
    yield a_client_that_fails_to_evaluate_is_blamed


def inputs_stay_untouched(part: Part) -> None:
    """Rounds leave broadcast and data as they were."""
    if changed := _of(part).changed:
        raise AssertionError(f"an input was changed in place: {changed}")


def answers_equal_the_local_engines(part: Part) -> None:
    """Answers to the survey are those of the local engine."""
    found, expected = (
        {str(r.client): r.sums for r in one.replies("survey") if isinstance(r, Answer)}
        for one in (_of(part), _local())
    )
    problems.assert_same(found, expected, "answers to the survey, beside the local engine's", 0.0)


def two_rounds_equal_the_local_engines(part: Part) -> None:
    """Posteriors, losses and memories of a ragged cohort are those of the local engine."""
    found, expected = (_by_client(one.replies("second fit")) for one in (_of(part), _local()))
    for client, result in expected.items():
        if client not in found:
            raise AssertionError(f"client {client} did not reply")
        problems.assert_same(found[client], result, f"client {client} beside the local engine's")


def evaluation_equals_the_local_engines(part: Part) -> None:
    """Sums of metrics are those of the local engine."""
    found, expected = (
        {str(r.client): r.personal for r in one.replies("evaluate") if isinstance(r, Evaluation)}
        for one in (_of(part), _local())
    )
    if missing := sorted(expected.keys() - found.keys()):
        raise AssertionError(f"no evaluation of the clients {', '.join(missing)}")
    problems.assert_same(
        found, expected, "sums of metrics, client by client, beside the local engine's"
    )


def replies_are_sorted_by_client(part: Part) -> None:
    """Replies arrive in order of client ids."""
    for stage in ("first fit", "evaluate"):
        order = [client for reply in _of(part).replies(stage) for client in _clients(reply)]
        if order != sorted(order):
            raise AssertionError(f"replies of {stage.split()[-1]} come in the order {order}")


def a_client_that_fails_to_fit_is_blamed(part: Part) -> None:
    """An exception in `fit` becomes that client's error; the others' results arrive."""
    _only_the_guilty(_of(part), "fit")


def a_client_that_fails_to_evaluate_is_blamed(part: Part) -> None:
    """An exception in `personalise` becomes that client's error; the others are evaluated."""
    _only_the_guilty(_of(part), "evaluate")


@component
class Faulty(Map):
    """An inference that fails for one client in one round."""

    name = "faulty"

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Raise if the guilty client takes part."""
        _fail(cohort)
        return super().fit(problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Raise if the guilty client takes part."""
        _fail(cohort)
        return super().personalise(problem, broadcast, cohort)


def _fail(cohort: Cohort) -> None:
    if GUILTY in cohort.clients and cohort.round == FAULTY_ROUND:
        raise RuntimeError("out of luck")


@attrs.frozen
class Record:
    """The outcome of each stage of a session: its replies, or the exception it raised."""

    stages: dict[str, list[Any] | Exception]
    changed: str

    def replies(self, stage: str) -> list[Any]:
        """Return the replies of a stage; raise what it raised."""
        found = self.stages[stage]
        if isinstance(found, Exception):
            raise found
        return found


def _record(engine: Engine) -> Record:
    """Run two rounds, the second from client 0's result; evaluate; then let a client fail."""
    inference, of = problems.build(Faulty), problems.separable(sharing="body")
    first = problems.first_broadcast(inference, of)
    before = problems.copies(first, of.train)
    stages: dict[str, list[Any] | Exception] = {}
    with engine.open(of, inference, BINS) as session:
        stages["survey"] = _tried(lambda: list(session.survey({}, of.clients)))
        stages["first fit"] = found = _tried(lambda: _fitted(session, first, of))
        results = [] if isinstance(found, Exception) else found
        start = next((r.posterior[0] for r in results if _clients(r)[0] == 0), first.start)
        second = attrs.evolve(first, round=1, start=start)
        stages["second fit"] = _tried(lambda: _fitted(session, second, of))
        stages["evaluate"] = _tried(lambda: list(session.evaluate(second, of.clients)))
        faulty = attrs.evolve(second, round=FAULTY_ROUND)
        stages["faulty fit"] = _tried(lambda: list(session.fit(faulty, of.clients)))
        stages["faulty evaluate"] = _tried(lambda: list(session.evaluate(faulty, of.clients)))
    changes = map(problems.difference, (first, of.train), before)
    return Record(stages, next(filter(None, changes), ""))


def _fitted(session: Session, broadcast: Broadcast, of: Problem) -> list[LocalResult]:
    results = []
    for reply in session.fit(broadcast, of.clients):
        if isinstance(reply, ClientError):
            raise AssertionError(f"client {reply.client} failed: {reply}")  # noqa: TRY004
        session.store(reply)
        results.append(reply)
    return results


def _tried(stage: Callable[[], list[Any]]) -> list[Any] | Exception:
    try:
        return stage()
    except Exception as error:  # noqa: BLE001 - an engine may raise anything
        return error


@lru_cache(maxsize=1)
def _of(part: Part) -> Record:
    return _record(part())


@cache
def _local() -> Record:
    return _record(problems.build(Local, workers=1))


def _by_client(results: list[LocalResult]) -> dict[int, LocalResult]:
    return {
        client: result.select([row])
        for result in results
        for row, client in enumerate(result.clients)
    }


def _clients(reply: Any) -> tuple[int, ...]:
    return (reply.client,) if isinstance(reply, ClientError | Evaluation) else reply.clients


def _only_the_guilty(record: Record, stage: str) -> None:
    try:
        replies = record.replies(f"faulty {stage}")
    except Exception as error:
        raise AssertionError(
            f"one client's exception ended the round ({type(error).__name__}: {error}); yield a "
            "ClientError for that client instead (bflcore.engines.client does)"
        ) from error
    errors = [reply for reply in replies if isinstance(reply, ClientError)]
    blamed = [f"client {error.client} in {error.stage}" for error in errors]
    if blamed != [f"client {GUILTY} in {stage}"]:
        said = ", ".join(blamed) or "nobody"
        raise AssertionError(f"client {GUILTY} failed in {stage}, but errors name {said}")
    if "out of luck" not in errors[0].reason:
        raise AssertionError(
            f"the client raised RuntimeError('out of luck'); the reason given is "
            f"{errors[0].reason!r}"
        )
    innocent = [client for client in range(len(problems.SIZES)) if client != GUILTY]
    others = sorted(c for reply in replies if reply not in errors for c in _clients(reply))
    if others != innocent:
        raise AssertionError(f"only clients {others} of {innocent} replied")
