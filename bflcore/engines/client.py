"""What happens at a client: fitting, and evaluation on its own test samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
import torch
from torch import Tensor

from bflcore.errors import BflError, ClientError
from bflcore.inference.base import Explorable
from bflcore.messages import Evaluation
from bflcore.problem import metrics

if TYPE_CHECKING:
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.problem.base import Problem
    from bflcore.problem.likelihoods import Predictive

__all__ = ["Memory", "evaluate_clients", "fit_clients", "stack"]

Memory = Mapping[str, Tensor]
Sums = dict[str, Tensor]
Reply = TypeVar("Reply")

BLOCK = 2048  # test samples predicted at a time; bounds memory, does not change results


def stack(memories: Sequence[Memory]) -> dict[str, Tensor]:
    """Put clients' memories under one client axis."""
    return {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}


def fit_clients(
    problem: Problem,
    inference: LocalInference,
    broadcast: Broadcast,
    clients: Sequence[int],
    memories: Sequence[Memory],
) -> list[LocalResult | ClientError]:
    """Fit a chunk of clients together; when that fails, each alone, so that blame is exact."""
    order = sorted(range(len(clients)), key=lambda i: (-problem.train.size(clients[i]), clients[i]))

    def together() -> list[LocalResult | ClientError]:
        chosen = [clients[i] for i in order]
        cohort = problem.cohort(chosen, stack([memories[i] for i in order]), broadcast.round)
        result = inference.fit(problem, broadcast, cohort)
        back = sorted(range(len(chosen)), key=lambda row: chosen[row])
        return [result if back == list(range(len(back))) else result.select(back)]

    if len(clients) == 1:
        return _blamed(together, clients[0], "fit")
    try:
        return together()
    except Exception:  # any fault of a plugin: find out below whose it is
        alone = [
            fit_clients(problem, inference, broadcast, [client], [memory])
            for client, memory in zip(clients, memories, strict=True)
        ]
        return [reply for replies in alone for reply in replies]


def evaluate_clients(
    problem: Problem,
    inference: LocalInference,
    broadcast: Broadcast,
    clients: Sequence[int],
    memories: Sequence[Memory],
    bins: int,
) -> list[Evaluation | ClientError]:
    """Evaluate clients one by one on their own test samples."""

    def one(client: int, memory: Memory) -> list[Evaluation | ClientError]:
        cohort = problem.cohort([client], stack([memory]), broadcast.round)
        personalised = inference.personalise(problem, broadcast, cohort)
        cohort = attrs.evolve(cohort, memory=personalised)
        personal = _sums(problem, inference, broadcast, cohort, bins)
        if not personal:
            return []  # no test samples, nothing to report
        shared = None
        if not problem.layout.personal_total:  # the server's model is complete
            initial = inference.initial_memory(problem)
            shared = personal
            if not _equal(personalised, initial):
                alone = attrs.evolve(cohort, memory=stack([initial]))
                shared = _sums(problem, inference, broadcast, alone, bins)
        return [
            Evaluation(
                client, personal, shared, _curves(problem, inference, broadcast, cohort, bins)
            )
        ]

    replies = [
        _blamed(partial(one, client, memory), client, "evaluate")
        for client, memory in zip(clients, memories, strict=True)
    ]
    return [reply for found in replies for reply in found]


def _equal(memory: Memory, initial: Memory) -> bool:
    return memory.keys() == initial.keys() and all(
        torch.equal(memory[name][0], initial[name]) for name in initial
    )


def _sums(
    problem: Problem, inference: LocalInference, broadcast: Broadcast, cohort: Cohort, bins: int
) -> Sums:
    total: Sums = {}
    # Every block draws from the same streams: one set of parameter draws for all of the samples.
    for x, y in _blocks(problem, cohort):
        with torch.no_grad():
            predictive = inference.predict(problem, broadcast, cohort, x[None])
        sums = _measure(predictive, y, bins)
        total = metrics.add(total, sums) if total else sums
    return total


def _curves(
    problem: Problem, inference: LocalInference, broadcast: Broadcast, cohort: Cohort, bins: int
) -> dict[str, dict[float, Sums]]:
    total: dict[str, dict[float, Sums]] = {}
    if not isinstance(inference, Explorable):
        return total
    for x, y in _blocks(problem, cohort):
        with torch.no_grad():
            found = inference.curves(problem, broadcast, cohort, x[None])
        for axis, predictions in found.items():
            sums = total.setdefault(axis, {})
            for value, predictive in predictions.items():
                one = _measure(predictive, y, bins)
                sums[value] = metrics.add(sums[value], one) if value in sums else one
    return total


def _measure(predictive: Predictive, y: Tensor, bins: int) -> dict[str, Tensor]:
    draws = predictive.draws[0]
    if predictive.noise is None:
        return metrics.classification_sums(draws, y, bins)
    noise = predictive.noise[0] if predictive.noise.ndim else predictive.noise
    variance = draws.var(0, correction=0) + noise
    return metrics.regression_sums(draws.mean(0), variance, y)


def _blocks(problem: Problem, cohort: Cohort) -> Iterator[tuple[Tensor, Tensor]]:
    (client,) = cohort.clients
    x, y = problem.test.of(client)
    if len(y):  # nothing splits into one block of nothing, which has no figures
        yield from zip(x.split(BLOCK), y.split(BLOCK), strict=True)


def _blamed(
    work: Callable[[], list[Reply | ClientError]], client: int, stage: str
) -> list[Reply | ClientError]:
    try:
        return list(work())
    except ClientError as error:
        return [error]
    except BflError as error:
        return [ClientError(client, stage, str(error))]
    except Exception as error:  # a plugin may raise anything; the round goes on without the client
        return [ClientError(client, stage, f"{type(error).__name__}: {error}".split("\n", 1)[0])]
