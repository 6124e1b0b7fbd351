"""The inference `swag`: gradient descent whose path is a posterior (Maddox et al. 2019).

Torch is imported lazily: listing parts never waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore import Gaussian, GradientInference, component, option
from bflcore.inference.gradient import Gradient, batches, mean_loss, steps
from bflcore.inference.memory import client_posterior, join_personal, local_result
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Predictive, Problem
else:
    torch = lazy("torch")

__all__ = ["SWAG", "Path"]


@component
class SWAG(GradientInference):
    """Fit a Gaussian to the path of stochastic gradient descent: its mean and its variances.

    Parameters that the data do not determine keep moving, and their variance is wide.
    """

    name = "swag"
    reference = "Maddox, Garipov, Izmailov, Vetrov & Wilson 2019 (SWAG-Diagonal), section 3.2"
    family = "gaussian"

    burn_in: float = option(
        0.5, "share of a round's steps before the path is recorded", at_least=0, below=1
    )
    scale: float = option(1.0, "factor of the variances", above=0)
    predict_draws: int = option(20, "parameter draws averaged in a prediction", at_least=1)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's initialisation with variance zero."""
        return Gaussian(problem.initial, 0 * problem.initial)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Descend the negative log likelihood and return the path's moments for every client."""
        weights = join_personal(problem, broadcast.start, cohort).mean.clone()
        path = Path.of(weights)
        taken = steps(self, cohort)
        first = torch.tensor([int(self.burn_in * count) for count in taken])
        optimiser = self.update_rule(weights, cohort)
        differentiate = Gradient(problem)
        loss = weights.new_zeros(len(weights))
        for step, batch in enumerate(batches(self, cohort)):
            k = len(batch.sizes)
            nll, gradient = differentiate(weights[:k], batch)
            optimiser.step(gradient)
            path.record(weights[:k], (first[:k] <= step).to(weights))
            loss[:k] += nll
        posterior = Gaussian(path.mean, self.scale * path.variance)
        return local_result(problem, cohort, posterior, mean_loss(loss, taken))

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Average over draws of the parameters, the same for all samples of a client."""
        whole = client_posterior(problem, broadcast, cohort)
        size, like = (self.predict_draws, whole.mean.shape[-1]), whole.mean
        noise = torch.stack(
            [
                torch.randn(size, generator=generator, device=like.device, dtype=like.dtype)
                for generator in cohort.streams("predict")
            ]
        )
        draws = whole.map(lambda tensor: tensor[:, None]).sample(noise)
        return problem.likelihood.predictive(problem.outputs(draws, x))


@attrs.frozen(eq=False)
class Path:
    """The running moments of points ``[K, P]``, for each client separately; changed in place.

    `mean` ``[K, P]``, `squares` ``[K, P]`` (the sum of squared deviations from it) and `count`
    ``[K, 1]`` follow Welford's recurrence: sums of squares would cancel where a path is short.
    """

    mean: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, start: Tensor) -> Path:
        """Return a path without points, whose mean is `start` ``[K, P]``."""
        return cls(start.clone(), torch.zeros_like(start), start.new_zeros(len(start), 1))

    def record(self, points: Tensor, due: Tensor) -> None:
        """Add points ``[k, P]`` of the first k clients, where `due` ``[k]`` is 1 and not 0."""
        k, new = len(points), due[:, None]
        count = self.count[:k].add_(new)
        apart = (points - self.mean[:k]) * new
        self.mean[:k] += apart / count.clamp_min(1)
        self.squares[:k] += apart * (points - self.mean[:k])

    @property
    def variance(self) -> Tensor:
        """Variance about the path's mean ``[K, P]``."""
        return self.squares / self.count.clamp_min(1)
