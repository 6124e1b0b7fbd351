"""The numerics of `swag`: gradient descent whose path is a posterior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from bflcore import Gaussian
from bflcore.inference.gradient import Gradient, Optimiser, batches, mean_loss, steps
from bflcore.inference.memory import join_personal, local_result

if TYPE_CHECKING:
    from torch import Tensor

    from bfl_swag.plugin import SWAG
    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Predictive, Problem

__all__ = ["Path", "fit", "predict"]


class Path:
    """The running mean and variance of points ``[K, P]``, each client counted by itself.

    Welford's recurrence: sums of squares would cancel where a path is short.
    """

    def __init__(self, start: Tensor) -> None:
        self.mean = start.clone()
        self._squares = torch.zeros_like(start)
        self._count = start.new_zeros(len(start), 1)

    def record(self, points: Tensor, due: Tensor) -> None:
        """Add the first k clients' points ``[k, P]``, of those that are `due` ``[k]``."""
        k, new = len(points), due[:, None]
        count = self._count[:k].add_(new)
        apart = (points - self.mean[:k]) * new
        self.mean[:k] += apart / count.clamp_min(1)
        self._squares[:k] += apart * (points - self.mean[:k])

    @property
    def variance(self) -> Tensor:
        """Variance about the path's own mean ``[K, P]``."""
        return self._squares / self._count.clamp_min(1)


def fit(inference: SWAG, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
    """Descend the negative log likelihood and return the path's moments for every client."""
    begin = join_personal(problem, broadcast.start, cohort.memory, len(cohort.clients))
    weights, path = begin.mean.clone(), Path(begin.mean)
    taken = steps(inference, cohort)
    first = torch.tensor([int(inference.burn_in * steps) for steps in taken])
    optimiser = Optimiser(inference, weights, taken, broadcast.round)
    differentiate = Gradient(problem)
    loss = weights.new_zeros(len(weights))
    for step, batch in enumerate(batches(inference, cohort)):
        k = len(batch.sizes)
        nll, gradient = differentiate(weights[:k], batch)
        optimiser.step(gradient)
        path.record(weights[:k], (first[:k] <= step).to(weights))
        loss[:k] += nll
    posterior = Gaussian(path.mean, inference.scale * path.variance)
    return local_result(problem, cohort, posterior, mean_loss(loss, taken))


def predict(
    inference: SWAG,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
    streams: list[torch.Generator],
) -> Predictive:
    """Predict with draws of the parameters, the same for all samples of a client."""
    whole = join_personal(problem, posterior, memory, len(x))
    size = (inference.predict_draws, whole.mean.shape[-1])
    noise = torch.stack(
        [
            torch.randn(size, generator=own, device=whole.mean.device, dtype=whole.mean.dtype)
            for own in streams
        ]
    )
    draws = whole.map(lambda tensor: tensor[:, None]).sample(noise)
    return problem.likelihood.predictive(problem.outputs(draws, x))
