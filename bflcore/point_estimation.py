"""Point estimates by minibatch gradients: the numerics of `PointInference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore import training
from bflcore.posteriors import Point

if TYPE_CHECKING:
    from bflcore.inference import Broadcast, Cohort, LocalResult, Part, PointInference
    from bflcore.problem import Problem

__all__ = ["fit"]


def fit(
    inference: PointInference,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    part: Part = "all",
) -> LocalResult:
    """Minimise the mean NLL per sample + anchor/2 * ||w - prior mean||^2 for every client.

    Weight decay adds weight_decay/2 * ||w||^2. ``part = "personal"`` moves the personal
    coordinates alone.
    """
    clients = len(cohort.clients)
    weights = training.joined(problem, broadcast.start, cohort.memory, clients).mean.clone()
    prior = training.joined(problem, broadcast.prior, cohort.memory, clients).mean
    taken = training.steps(inference, cohort)
    optimiser = training.Optimiser(inference, weights, taken, broadcast.round)
    moves = training.moving(problem, part)
    differentiate = inference.gradient(problem, cohort)
    loss = weights.new_zeros(clients)
    for batch in training.batches(inference, cohort):
        active = len(batch.sizes)
        w = weights[:active]
        nll, gradient = differentiate(w, batch)
        if inference.anchor:
            gradient = gradient.add(w - prior[:active], alpha=inference.anchor)
        if inference.weight_decay:
            gradient = gradient.add(w, alpha=inference.weight_decay)
        optimiser.step(gradient if moves is None else gradient * moves)
        loss[:active] += nll
    return training.result(problem, cohort, Point(weights), training.mean_loss(loss, taken))
