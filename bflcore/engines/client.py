"""What happens at a client: fitting, and evaluation on its own test samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from bflcore.errors import BflError, ClientError
from bflcore.messages import Evaluation
from bflcore.problem import metrics
from bflcore.randomness import stream

if TYPE_CHECKING:
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast, LocalResult
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
        stacked = stack([memory])
        cohort = problem.cohort([client], stacked, broadcast.round)
        own = inference.personalise(problem, broadcast, cohort, novel=client in problem.novel)

        def figures(memory: Memory) -> dict[str, Tensor]:
            return _sums(problem, inference, broadcast, client, memory, bins)

        def curves(memory: Memory) -> dict[str, dict[float, Sums]]:
            return _curves(problem, inference, broadcast, client, memory, bins)

        personal = figures(own)
        if not personal:
            return []  # no test samples, nothing to report
        if problem.layout.personal_total:
            return [Evaluation(client, personal, None, curves(own))]
        start = inference.remember(problem)
        shared = personal if _equal(own, start) else figures(stack([start]))
        return [Evaluation(client, personal, shared, curves(own))]

    replies = [
        _blamed(partial(one, client, memory), client, "evaluate")
        for client, memory in zip(clients, memories, strict=True)
    ]
    return [reply for found in replies for reply in found]


def _equal(memory: Memory, start: Memory) -> bool:
    return memory.keys() == start.keys() and all(
        torch.equal(memory[name][0], start[name]) for name in start
    )


def _sums(
    problem: Problem,
    inference: LocalInference,
    broadcast: Broadcast,
    client: int,
    memory: Memory,
    bins: int,
) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for x, y in _blocks(problem, client):
        # The same stream for every block: one set of parameter draws for all of a client's samples.
        draws = [stream(problem.seed, broadcast.round, client, "predict", problem.device)]
        with torch.no_grad():
            predictive = inference.predict(problem, broadcast.start, memory, x[None], draws)
        sums = _measure(predictive, y, bins)
        total = metrics.add(total, sums) if total else sums
    return total


def _curves(
    problem: Problem,
    inference: LocalInference,
    broadcast: Broadcast,
    client: int,
    memory: Memory,
    bins: int,
) -> dict[str, dict[float, Sums]]:
    total: dict[str, dict[float, Sums]] = {}
    for x, y in _blocks(problem, client):
        draws = [stream(problem.seed, broadcast.round, client, "predict", problem.device)]
        with torch.no_grad():
            found = inference.curves(problem, broadcast.start, memory, x[None], draws)
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


def _blocks(problem: Problem, client: int) -> Iterator[tuple[Tensor, Tensor]]:
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
