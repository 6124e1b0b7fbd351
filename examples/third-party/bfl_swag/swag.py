"""The inference `swag`: a posterior from the trajectory of SGD (Maddox et al. 2019).

Torch is imported lazily, so that listing components stays fast.
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
    """Fit a Gaussian to the mean and the variances of the SGD trajectory.

    Parameters that the data do not determine keep moving, so their variance is large.
    """

    name = "swag"
    reference = "Maddox, Garipov, Izmailov, Vetrov & Wilson 2019 (SWAG-Diagonal), section 3.2"
    family = "gaussian"

    burn_in: float = option(
        0.5, "fraction of a round's steps left out of the trajectory", at_least=0, below=1
    )
    scale: float = option(1.0, "factor by which the variances are multiplied", above=0)
    predict_draws: int = option(20, "parameter draws averaged per prediction (S)", at_least=1)

    @property
    def leaves_certain(self) -> bool:
        """True: a parameter that did not move has variance 0."""
        return True

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's initialisation with variance 0 ``[P]``."""
        return Gaussian(problem.initial, 0 * problem.initial)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client; return the moments of its trajectory ``[K, P]``."""
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
        """Average over parameter draws, the same for all samples of a client."""
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
    """The running moments of each client's points ``[K, P]``; changed in place.

    `mean` ``[K, P]``, `squares` ``[K, P]`` (the sum of squared deviations from the mean) and
    `count` ``[K, 1]`` follow Welford's recurrence, since plain sums of squares may cancel.
    """

    mean: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, start: Tensor) -> Path:
        """Return an empty path with mean `start` ``[K, P]``."""
        return cls(start.clone(), torch.zeros_like(start), start.new_zeros(len(start), 1))

    def record(self, points: Tensor, due: Tensor) -> None:
        """Add points ``[k, P]`` for those of the first k clients where `due` ``[k]`` is 1."""
        k, new = len(points), due[:, None]
        count = self.count[:k].add_(new)
        apart = (points - self.mean[:k]) * new
        self.mean[:k] += apart / count.clamp_min(1)
        self.squares[:k] += apart * (points - self.mean[:k])

    @property
    def variance(self) -> Tensor:
        """Variance of the points ``[K, P]``."""
        return self.squares / self.count.clamp_min(1)
