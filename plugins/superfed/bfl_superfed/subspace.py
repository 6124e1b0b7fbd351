"""A client's round: what it holds out, when its local model joins, and FedAvg's until then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bfl_superfed import mixing
from bflcore.inference.gradient import Gradient, Optimiser, batches, mean_loss, steps
from bflcore.inference.memory import PERSONAL, join_personal, local_result
from bflcore.posteriors import Point
from bflcore.randomness import SERVER, stream

if TYPE_CHECKING:
    from bfl_superfed.plugin import LowLossSubspace
    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = [
    "LOCAL",
    "STARTED",
    "fit",
    "hold_out",
    "remember",
    "with_local_models",
]

# A client's memory: its local model ``[P]``, and whether (1) or not (0) it has one.
LOCAL, STARTED = "local", "started"


def remember(inference: LowLossSubspace, problem: Problem) -> dict[str, Tensor]:
    """Return the memory of a client without a local model: zeros where it will be."""
    personal = inference.initial(problem).split(problem.layout)[1].pack(PERSONAL)
    zeros = torch.zeros_like(problem.initial)
    return {LOCAL: zeros, STARTED: zeros.new_zeros(()), **personal}


def fit(
    inference: LowLossSubspace, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Minimise eq. 3 for every client of the cohort."""
    personal = inference.personal(problem, broadcast.round)
    if personal:
        cohort = attrs.evolve(cohort, memory=with_local_models(problem, cohort))
    seen = hold_out(inference, problem, cohort)[0]
    server = join_personal(problem, broadcast.start, cohort.memory, len(cohort.clients)).mean
    if not personal:
        weights, loss = _federated(inference, problem, broadcast, seen, server)
        return local_result(problem, cohort, Point(weights), loss)
    local = cohort.memory[LOCAL]
    models, loss = mixing.train(inference, problem, broadcast, seen, server, local)
    cohort = attrs.evolve(cohort, memory={**cohort.memory, LOCAL: models[:, 1].clone()})
    return local_result(problem, cohort, Point(models[:, 0].clone()), loss)


def hold_out(
    inference: LowLossSubspace, problem: Problem, cohort: Cohort
) -> tuple[Cohort, list[Tensor]]:
    """Divide each client's samples: a cohort to train on, and the rows ``[V]`` that validate.

    The division is the same in every round. Nothing is held out where no lambda is chosen.
    """
    chooses = inference.lambda_selection == "validation" and inference.start < 1
    if not chooses:
        return cohort, [torch.empty(0, dtype=torch.int64)] * len(cohort.sizes)
    orders = [
        torch.randperm(size, generator=_stream(problem, client, "validation"))
        for client, size in zip(cohort.clients, cohort.sizes, strict=True)
    ]
    counts = [max(1, int(inference.validation_fraction * n)) if n > 1 else 0 for n in cohort.sizes]
    held = [order[:count] for order, count in zip(orders, counts, strict=True)]
    kept = [order[count:].sort().values for order, count in zip(orders, counts, strict=True)]
    index = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True).to(cohort.x.device)
    rows = torch.arange(len(kept), device=index.device)[:, None]
    sizes = tuple(map(len, kept))
    return attrs.evolve(cohort, x=cohort.x[rows, index], y=cohort.y[rows, index], sizes=sizes), held


def with_local_models(problem: Problem, cohort: Cohort) -> dict[str, Tensor]:
    """Return the memories, every client's with a local model: its own random start if need be."""
    local = cohort.memory[LOCAL].clone()
    for row, (client, started) in enumerate(
        zip(cohort.clients, cohort.memory[STARTED].tolist(), strict=True)
    ):
        if not started:
            local[row] = _random_start(problem, client)
    return {**cohort.memory, LOCAL: local, STARTED: torch.ones_like(cohort.memory[STARTED])}


def _random_start(problem: Problem, client: int) -> Tensor:
    """Return the elements of each initial tensor in another order ``[P]``.

    Elements of a random initialisation are exchangeable, so this is a draw from the same
    distribution, whatever it was, without PyTorch's global generator.
    """
    noise = _stream(problem, client, "local model")
    pieces = problem.initial.split(problem.layout.sizes)
    return torch.cat([p[torch.randperm(len(p), generator=noise).to(p.device)] for p in pieces])


def _stream(problem: Problem, client: int, purpose: str) -> torch.Generator:
    return stream(problem.seed, SERVER, client, purpose)  # of no round: drawn once a run


def _federated(
    inference: LowLossSubspace,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    server: Tensor,
) -> tuple[Tensor, Tensor]:
    """Train w_f ``[K, P]`` alone (lambda = 0): FedAvg, or FedProx where mu > 0."""
    weights = server.clone()
    taken = steps(inference, cohort)
    optimiser = Optimiser(inference, weights, taken, broadcast.round)
    differentiate = Gradient(problem)
    loss = weights.new_zeros(len(weights))
    for batch in batches(inference, cohort):
        k = len(batch.sizes)
        w = weights[:k]
        nll, gradient = differentiate(w, batch)
        if inference.mu and inference.prox == "squared":
            gradient = gradient.add(w - server[:k], alpha=inference.mu)
        elif inference.mu:
            gradient = gradient.add(mixing.directions(problem, w - server[:k]), alpha=inference.mu)
        if inference.weight_decay:
            gradient = gradient.add(w, alpha=inference.weight_decay)
        optimiser.step(gradient)
        loss[:k] += nll
    return weights, mean_loss(loss, taken)
