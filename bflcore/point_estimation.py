"""Point estimates by minibatch gradients: the numerics of `PointInference`.

`descend` is the loop of every method that trains weights; what sets methods apart is the gradient
that they hand it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bflcore import training
from bflcore.posteriors import Point

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.inference import (
        Broadcast,
        Cohort,
        GradientInference,
        LocalResult,
        Part,
        PointInference,
    )
    from bflcore.problem import Problem

__all__ = ["Bend", "Slope", "descend", "fit", "objective"]

# What `descend` follows: losses ``[k]`` and gradients ``[k, P]`` at weights ``[k, P]``.
Slope = Callable[["Tensor", "training.Batch"], "tuple[Tensor, Tensor]"]
# A method's change of it: the same from the objective's slope, weights and batch.
Bend = Callable[[Slope, "Tensor", "training.Batch"], "tuple[Tensor, Tensor]"]


def fit(
    inference: PointInference,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    part: Part = "all",
    bend: Bend | None = None,
) -> LocalResult:
    """Minimise the `objective` for every client, from the broadcast's start.

    ``part = "personal"`` moves the personal coordinates alone, ``"shared"`` the others; `bend`
    replaces the slope that is followed.
    """
    clients = len(cohort.clients)
    start = training.joined(problem, broadcast.start, cohort.memory, clients).mean
    centre = start
    if inference.anchor_to == "prior":
        centre = training.joined(problem, broadcast.prior, cohort.memory, clients).mean
    slope = objective(inference, problem, cohort, centre)
    if bend is not None:
        slope = partial(bend, slope)
    weights, loss = descend(inference, problem, cohort, start, broadcast.round, slope, part)
    return training.result(problem, cohort, Point(weights), loss)


def objective(inference: PointInference, problem: Problem, cohort: Cohort, centre: Tensor) -> Slope:
    """Return the slope of NLL per sample + anchor/2 * ||w - centre||^2 + weight_decay/2 * ||w||^2.

    `centre` ``[K, P]``; the loss is that of the likelihood alone.
    """
    differentiate = inference.gradient(problem, cohort)

    def slope(w: Tensor, batch: training.Batch) -> tuple[Tensor, Tensor]:
        nll, gradient = differentiate(w, batch)
        if inference.anchor:
            gradient = gradient.add(w - centre[: len(w)], alpha=inference.anchor)
        if inference.weight_decay:
            gradient = gradient.add(w, alpha=inference.weight_decay)
        return nll, gradient

    return slope


def descend(
    inference: GradientInference,
    problem: Problem,
    cohort: Cohort,
    start: Tensor,
    round: int,
    slope: Slope,
    part: Part = "all",
) -> tuple[Tensor, Tensor]:
    """Follow `slope` from `start` ``[K, P]`` over every client's minibatches.

    Returns the weights ``[K, P]`` and each client's mean loss ``[K]``.
    """
    weights = start.clone()
    taken = training.steps(inference, cohort)
    optimiser = training.Optimiser(inference, weights, taken, round)
    moves = training.moving(problem, part)
    loss = weights.new_zeros(len(weights))
    for batch in training.batches(inference, cohort):
        active = len(batch.sizes)
        nll, gradient = slope(weights[:active], batch)
        optimiser.step(gradient if moves is None else gradient * moves)
        loss[:active] += nll
    return weights, training.mean_loss(loss, taken)
