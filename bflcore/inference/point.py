"""Point estimates by minibatch gradients.

`descend` is the training loop of all methods that train weights; they differ in the gradient that
they pass to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from bflcore.inference.gradient import (
    Batch,
    Gradient,
    GradientInference,
    Trainable,
    batches,
    mean_loss,
    steps,
    trainable_mask,
)
from bflcore.inference.memory import client_posterior, join_personal, local_result
from bflcore.options import component, option
from bflcore.posteriors import Point

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.problem.likelihoods import Predictive

__all__ = ["LossAndGradient", "Map", "PointInference", "descend", "fit_points", "objective"]

# From weights ``[k, P]`` and a batch to losses ``[k]`` and gradients ``[k, P]``.
LossAndGradient = Callable[["Tensor", "Batch"], "tuple[Tensor, Tensor]"]
# The same, given the objective's own function as the first argument.
Transform = Callable[[LossAndGradient, "Tensor", "Batch"], "tuple[Tensor, Tensor]"]


@component
class PointInference(GradientInference):
    """Base of point estimates.

    Minimises the mean negative log likelihood per sample + anchor/2 * ||w - centre||^2
    + weight_decay/2 * ||w||^2, where the centre is the prior's mean or the start of the round.
    Subclasses may override `gradient` to differentiate the likelihood in another way.
    """

    family = "point"

    anchor: float = option(0.0, "strength of the quadratic penalty around the anchor", at_least=0)
    anchor_to: str = option(
        "prior",
        "centre of that penalty: the prior's mean, or the start of the round (FedProx)",
        choices=("prior", "start"),
    )
    weight_decay: float = option(0.0, "strength of the quadratic penalty around zero", at_least=0)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's random initialisation as a point."""
        return Point(problem.initial)

    def gradient(self, problem: Problem, cohort: Cohort) -> LossAndGradient:
        """Return the function that computes the losses and gradients of the likelihood."""
        return Gradient(problem)

    def centre(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Tensor:
        """Return the centre ``[K, P]`` of the quadratic penalty."""
        anchor = broadcast.prior if self.anchor_to == "prior" else broadcast.start
        return join_personal(problem, anchor, cohort).mean

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client from the broadcast start."""
        return fit_points(self, problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Fit the personal parameters of novel clients; the shared ones stay fixed."""
        if not cohort.novel or not problem.layout.personal_total:
            return cohort.memory
        return fit_points(self, problem, broadcast, cohort, "personal").memory

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict with the point estimate: a single draw."""
        weights = client_posterior(problem, broadcast, cohort).mean
        return problem.likelihood.predictive(problem.outputs(weights[:, None], x))


@component
class Map(PointInference):
    """Find a point estimate: maximum likelihood, or MAP around the prior's mean."""

    name = "map"
    reference = "McMahan et al. 2017, Algorithm 1; anchor: Li et al. 2020 (FedProx), eq. 2"


def fit_points(
    inference: PointInference,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    trainable: Trainable = "all",
    transform: Transform | None = None,
) -> LocalResult:
    """Minimise the `objective` for every client, starting from the broadcast.

    Only the `trainable` parameters change; `transform` replaces the gradient of each step.
    """
    start = join_personal(problem, broadcast.start, cohort).mean
    centre = inference.centre(problem, broadcast, cohort)
    loss_and_gradient = objective(inference, problem, cohort, centre)
    if transform is not None:
        loss_and_gradient = partial(transform, loss_and_gradient)
    weights, loss = descend(inference, problem, cohort, start, loss_and_gradient, trainable)
    return local_result(problem, cohort, Point(weights), loss)


def objective(
    inference: PointInference, problem: Problem, cohort: Cohort, centre: Tensor
) -> LossAndGradient:
    """Return the loss and gradient of the objective around `centre` ``[K, P]``.

    Gradients are those of NLL per sample + anchor/2 * ||w - centre||^2 + weight_decay/2 * ||w||^2,
    losses those of the likelihood alone.
    """
    differentiate = inference.gradient(problem, cohort)

    def loss_and_gradient(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        nll, gradient = differentiate(w, batch)
        if inference.anchor:
            gradient = gradient.add(w - centre[: len(w)], alpha=inference.anchor)
        if inference.weight_decay:
            gradient = gradient.add(w, alpha=inference.weight_decay)
        return nll, gradient

    return loss_and_gradient


def descend(
    inference: GradientInference,
    problem: Problem,
    cohort: Cohort,
    start: Tensor,
    loss_and_gradient: LossAndGradient,
    trainable: Trainable = "all",
) -> tuple[Tensor, Tensor]:
    """Train on every client's minibatches, starting from `start` ``[K, P]``.

    Returns the weights ``[K, P]`` and each client's mean loss ``[K]``.
    """
    weights = start.clone()
    optimiser = inference.update_rule(weights, cohort)
    mask = trainable_mask(problem, trainable)
    loss = weights.new_zeros(len(weights))
    for batch in batches(inference, cohort):
        k = len(batch.sizes)
        nll, gradient = loss_and_gradient(weights[:k], batch)
        optimiser.step(gradient if mask is None else gradient * mask)
        loss[:k] += nll
    return weights, mean_loss(loss, steps(inference, cohort))
