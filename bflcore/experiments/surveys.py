"""The survey before round 1 and the calibration after the last round.

Before round 1 the server knows of the data what the *survey* tells it: sums over clients. After the
last round, calibrators get sums over samples that nobody trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.aggregation import Statistics, add_sums
from bflcore.engines.screening import screen_answer
from bflcore.errors import ClientError, RoundError
from bflcore.inference.base import answers
from bflcore.lazy import lazy
from bflcore.messages import CALIBRATION, Broadcast, Cohort, nbytes
from bflcore.problem.calibration.base import ANSWERED
from bflcore.problem.scaling import moments
from bflcore.randomness import SERVER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.engines.base import Session
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Answer
    from bflcore.problem.base import Problem
else:
    torch = lazy("torch")

__all__ = ["Survey", "calibrate", "survey"]


@attrs.frozen(eq=False)
class Survey:
    """What clients answered: the sums ``[...]`` by name, who was left out, and what was sent."""

    sums: Mapping[str, Tensor]
    dropped: tuple[ClientError, ...]
    bytes_up: int
    bytes_down: int


def survey(
    inference: LocalInference, problem: Problem, session: Session, min_clients: int = 1
) -> Survey:
    """Add up the clients' answers before round 1.

    If samples are to be standardised, the clients are asked for their moments first, and then
    `LocalInference.survey` sees standardised samples; whoever gave no valid answer is not asked
    again, so that all sums are over the same clients. Raises `RoundError` if fewer than
    `min_clients` give a valid answer.
    """
    sums: dict[str, Tensor] = {}
    dropped: list[ClientError] = []
    up = down = 0
    clients = problem.clients
    for form in _forms(inference, problem):
        down += len(clients) * nbytes(sums)
        found, answered = _add_up(session.survey(sums, clients), clients, form, "survey")
        dropped += found.dropped
        up += found.bytes_up
        if len(answered) < min_clients:
            raise _too_few("before round 1", "survey", answered, clients, min_clients, dropped)
        sums, clients = {**sums, **found.sums}, tuple(answered)
    return Survey(sums, tuple(dropped), up, down)


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
    down = len(clients) * nbytes(broadcast.sent())
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
        up += nbytes(answer.sums)
        answered[answer.client] = None
        total = add_sums(total, dict(answer.sums))
    return Survey(total, tuple(dropped), up, 0), list(answered)


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
    asked = answers(inference, problem, nobody)
    return [moments(x, y, problem.indicators), asked] if problem.standardise else [asked]
