"""Point estimates by minibatch gradients.

`descend` is the loop of every method that trains weights; what sets methods apart is the gradient
that they hand it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from bflcore.inference.gradient import (
    Batch,
    Coordinates,
    Gradient,
    GradientInference,
    Optimiser,
    batches,
    mean_loss,
    steps,
    trainable_mask,
)
from bflcore.inference.memory import client_posterior, join_personal, local_result
from bflcore.options import component, option
from bflcore.posteriors import Point

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.problem.likelihoods import Predictive

__all__ = [
    "LossAndGradient",
    "Map",
    "PointInference",
    "Transform",
    "descend",
    "fit_points",
    "objective",
]

# What `descend` follows: losses ``[k]`` and gradients ``[k, P]`` at weights ``[k, P]``.
LossAndGradient = Callable[["Tensor", "Batch"], "tuple[Tensor, Tensor]"]
# A method's change of it: the same from the objective's slope, weights and batch.
Transform = Callable[[LossAndGradient, "Tensor", "Batch"], "tuple[Tensor, Tensor]"]


@component
class PointInference(GradientInference):
    """Base of point estimates: everything but how they predict.

    Its objective is that of `Map`; `gradient` says how the likelihood is differentiated.
    """

    family = "point"

    anchor: float = option(0.0, "strength of the quadratic pull to the anchor", at_least=0)
    anchor_to: str = option(
        "prior",
        "where it pulls: to the prior's mean, or to where the round begins (FedProx)",
        choices=("prior", "start"),
    )
    weight_decay: float = option(0.0, "strength of the quadratic pull to zero", at_least=0)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's random initialisation as a point."""
        return Point(problem.initial)

    def gradient(
        self, problem: Problem, cohort: Cohort
    ) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        """Return what computes losses ``[k]`` and gradients ``[k, P]`` at weights ``[k, P]``."""
        return Gradient(problem)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client from the broadcast."""
        return fit_points(self, problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Fit a novel client's personal coordinates, the shared ones fixed."""
        if not novel or not problem.layout.personal_total:
            return cohort.memory
        return fit_points(self, problem, broadcast, cohort, "personal").memory


@component
class Map(PointInference):
    """Find a point estimate: maximum likelihood, or MAP around the prior's mean.

    Minimises the mean negative log likelihood per sample + anchor/2 * ||w - centre||^2
    + weight_decay/2 * ||w||^2, the centre being the prior's mean or the round's start.
    """

    name = "map"
    reference = "McMahan et al. 2017, Algorithm 1; anchor: Li et al. 2020 (FedProx), eq. 2"

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict with the point: one draw."""
        whole = client_posterior(problem, posterior, memory, len(x))
        return problem.likelihood.predictive(problem.outputs(whole.mean[:, None], x))


def fit_points(
    inference: PointInference,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    part: Coordinates = "all",
    transform: Transform | None = None,
) -> LocalResult:
    """Minimise the `objective` for every client, from the broadcast's start.

    ``part = "personal"`` moves the personal coordinates alone, ``"shared"`` the others; `transform`
    replaces the slope that is followed.
    """
    clients = len(cohort.clients)
    start = join_personal(problem, broadcast.start, cohort.memory, clients).mean
    centre = start
    if inference.anchor_to == "prior":
        centre = join_personal(problem, broadcast.prior, cohort.memory, clients).mean
    slope = objective(inference, problem, cohort, centre)
    if transform is not None:
        slope = partial(transform, slope)
    weights, loss = descend(inference, problem, cohort, start, broadcast.round, slope, part)
    return local_result(problem, cohort, Point(weights), loss)


def objective(
    inference: PointInference, problem: Problem, cohort: Cohort, centre: Tensor
) -> LossAndGradient:
    """Return the slope of NLL per sample + anchor/2 * ||w - centre||^2 + weight_decay/2 * ||w||^2.

    `centre` ``[K, P]``; the loss is that of the likelihood alone.
    """
    differentiate = inference.gradient(problem, cohort)

    def slope(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
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
    slope: LossAndGradient,
    part: Coordinates = "all",
) -> tuple[Tensor, Tensor]:
    """Follow `slope` from `start` ``[K, P]`` over every client's minibatches.

    Returns the weights ``[K, P]`` and each client's mean loss ``[K]``.
    """
    weights = start.clone()
    taken = steps(inference, cohort)
    optimiser = Optimiser(inference, weights, taken, round)
    moves = trainable_mask(problem, part)
    loss = weights.new_zeros(len(weights))
    for batch in batches(inference, cohort):
        active = len(batch.sizes)
        nll, gradient = slope(weights[:active], batch)
        optimiser.step(gradient if moves is None else gradient * moves)
        loss[:active] += nll
    return weights, mean_loss(loss, taken)
