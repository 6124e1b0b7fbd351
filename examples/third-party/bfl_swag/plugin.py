"""The method `swag` and its inference: declarations, read by every listing.

Importing this module must not import torch; numerics live in `bfl_swag.fitting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bflcore import GradientInference, Method, component, hookimpl, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import (
        Broadcast,
        Cohort,
        LocalInference,
        LocalResult,
        Posterior,
        Predictive,
        Problem,
    )

PAPER = "Maddox, Garipov, Izmailov, Vetrov & Wilson 2019"


@component
class SWAG(GradientInference):
    """Fit a Gaussian to the path of stochastic gradient descent: its mean and its variances.

    Coordinates that data do not hold still wander, and their variance is wide.
    """

    name = "swag"
    reference = f"{PAPER} (SWAG-Diagonal), section 3.2"
    family = "gaussian"

    burn_in: float = option(
        0.5, "share of a round's steps before the path is recorded", at_least=0, below=1
    )
    scale: float = option(1.0, "what variances are multiplied by", above=0)
    predict_draws: int = option(20, "parameter draws averaged in a prediction", at_least=1)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's initialisation, known for certain."""
        from bflcore import Gaussian

        return Gaussian(problem.initial, 0 * problem.initial)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client of the cohort and record its path."""
        from bfl_swag import fitting

        return fitting.fit(self, problem, broadcast, cohort)

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Average predictions over draws from the Gaussian."""
        from bfl_swag import fitting

        return fitting.predict(self, problem, posterior, memory, x, streams)


class FederatedSWAG(Method):
    """Fuse the Gaussians that clients read off their paths of gradient descent."""

    name = "swag"
    reference = f"{PAPER}, federated by averaging; new in that combination"
    inference = SWAG(optimiser="sgd", lr=0.05, momentum=0.9)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference."""
    yield SWAG


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method."""
    yield FederatedSWAG
