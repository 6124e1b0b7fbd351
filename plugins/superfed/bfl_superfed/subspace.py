"""Eq. 3 of SuPerFed: one backward pass at a random mixture trains both models.

A cohort's models are one leaf ``[K, 2, P]``: row 0 the federated model w_f, row 1 the local w_l.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bflcore import training
from bflcore.inference import PERSONAL
from bflcore.posteriors import Point
from bflcore.randomness import SERVER, stream

if TYPE_CHECKING:
    from bfl_superfed.plugin import LowLossSubspace
    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = [
    "LOCAL",
    "STARTED",
    "Mixing",
    "fit",
    "hold_out",
    "penalise",
    "remember",
    "with_local_models",
]

# A client's memory: its local model ``[P]``, and whether (1) or not (0) it has one.
LOCAL, STARTED = "local", "started"

FLOOR = 1e-30  # of a squared norm; far below any that float32 weights of a network have


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
    server = training.joined(problem, broadcast.start, cohort.memory, len(cohort.clients)).mean
    if not personal:
        weights, loss = _federated(inference, problem, broadcast, seen, server)
        return training.result(problem, cohort, Point(weights), loss)
    models, loss = _mixed(inference, problem, broadcast, seen, server)
    cohort = attrs.evolve(cohort, memory={**cohort.memory, LOCAL: models[:, 1].clone()})
    return training.result(problem, cohort, Point(models[:, 0].clone()), loss)


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
    taken = training.steps(inference, cohort)
    optimiser = training.Optimiser(inference, weights, taken, broadcast.round)
    differentiate = training.Gradient(problem)
    loss = weights.new_zeros(len(weights))
    for batch in training.batches(inference, cohort):
        k = len(batch.sizes)
        w = weights[:k]
        nll, gradient = differentiate(w, batch)
        if inference.mu and inference.prox == "squared":
            gradient = gradient.add(w - server[:k], alpha=inference.mu)
        elif inference.mu:
            gradient = gradient.add(_directions(problem, w - server[:k]), alpha=inference.mu)
        if inference.weight_decay:
            gradient = gradient.add(w, alpha=inference.weight_decay)
        optimiser.step(gradient)
        loss[:k] += nll
    return weights, training.mean_loss(loss, taken)


def _mixed(
    inference: LowLossSubspace,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    server: Tensor,
) -> tuple[Tensor, Tensor]:
    """Train both models ``[K, 2, P]``: a fresh lambda, one backward pass, both gradients."""
    models = torch.stack([server, cohort.memory[LOCAL]], dim=1)
    taken = training.steps(inference, cohort)
    optimiser = training.Optimiser(inference, models, taken, broadcast.round)
    differentiate = training.Gradient(problem)
    draw = Mixing(inference, problem, cohort, taken)
    gradient, mixture = torch.empty_like(models), torch.empty_like(server)
    loss = models.new_zeros(len(models))
    for step, batch in enumerate(training.batches(inference, cohort)):
        k = len(batch.sizes)
        w, g, mix = models[:k], gradient[:k], draw(step, k)
        torch.lerp(w[:, 0], w[:, 1], mix, out=mixture[:k])
        nll, slope = differentiate(mixture[:k], batch)
        torch.mul(slope, mix, out=g[:, 1])  # dL/dw_l = lambda g
        torch.sub(slope, g[:, 1], out=g[:, 0])  # dL/dw_f = (1 - lambda) g
        penalise(inference, problem, g, w, server[:k])
        optimiser.step(g)
        loss[:k] += nll
    return models, training.mean_loss(loss, taken)


class Mixing:
    """The lambdas of a round: ``[k, 1]`` for the whole model, or ``[k, P]``, one a layer."""

    def __init__(
        self, inference: LowLossSubspace, problem: Problem, cohort: Cohort, taken: tuple[int, ...]
    ) -> None:
        layers = [name.rpartition(".")[0] for name in problem.layout.names]
        number = {layer: index for index, layer in enumerate(dict.fromkeys(layers))}
        count = len(number) if inference.mixing == "layer" else 1
        like = problem.initial
        draws = [
            torch.rand(steps, count, generator=generator, dtype=like.dtype, device=like.device)
            for steps, generator in zip(taken, cohort.streams("lambda"), strict=True)
        ]
        self._draws = torch.nn.utils.rnn.pad_sequence(draws)  # [steps, K, layers]
        self._sizes = torch.tensor(problem.layout.sizes, device=like.device)
        self._layer_of = torch.tensor([number[layer] for layer in layers], device=like.device)

    def __call__(self, step: int, clients: int) -> Tensor:
        """Return the lambdas of one step for the first clients."""
        drawn = self._draws[step, :clients]
        if drawn.shape[-1] == 1:
            return drawn
        return drawn[:, self._layer_of].repeat_interleave(self._sizes, dim=1)


def penalise(
    inference: LowLossSubspace, problem: Problem, gradient: Tensor, models: Tensor, server: Tensor
) -> None:
    """Add the gradients of weight decay, of mu * prox and of nu * cos^2 in place ``[k, 2, P]``.

    All but the pull's centre is linear in the two models: one small matrix product.
    """
    squared = inference.mu if inference.prox == "squared" else 0.0
    decay = inference.weight_decay
    linear = models.new_tensor([decay + squared, 0.0, 0.0, decay])
    if inference.nu:
        linear = _cosine_terms(models).mul_(inference.nu).add_(linear)
    gradient.baddbmm_(linear.expand(len(models), 4).view(-1, 2, 2), models)
    if squared:
        gradient[:, 0].sub_(server, alpha=squared)
    elif inference.mu:
        shift = models[:, 0] - server
        gradient[:, 0].add_(_directions(problem, shift), alpha=inference.mu)


def _cosine_terms(models: Tensor) -> Tensor:
    """Return M ``[k, 4]`` such that M.view(k, 2, 2) @ models is the gradient of cos(w_f, w_l)^2.

    With p = w_f . w_l the gradient in w_f is 2 p / (|w_f|^2 |w_l|^2) (w_l - p / |w_f|^2 w_f), and
    alike in w_l. Where a norm is 0, so is p, and the floor makes every term 0 (subgradient 0).
    """
    product = torch.linalg.vecdot(models[:, 0], models[:, 1])[:, None]
    squares = torch.linalg.vector_norm(models, dim=2).square().clamp_min(FLOOR)  # [k, 2]
    ratio = product / squares
    cross = 2 * ratio[:, :1] / squares[:, 1:]
    own = -cross * ratio
    return torch.cat([own[:, :1], cross, cross, own[:, 1:]], dim=1)


def _directions(problem: Problem, shift: Tensor) -> Tensor:
    """Return the gradient of the sum over tensors of |w_f - w_g| ``[k, P]``; 0 where they agree."""
    pieces = shift.split(problem.layout.sizes, dim=1)
    return torch.cat([torch.nn.functional.normalize(piece, dim=1) for piece in pieces], dim=1)
