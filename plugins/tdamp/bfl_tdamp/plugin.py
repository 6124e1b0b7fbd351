"""The method `em-tdamp` and its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bfl_tdamp.em import EMGroupSparse
from bfl_tdamp.fusion import GeometricMean
from bfl_tdamp.posterior import BernoulliGaussian
from bflcore import (
    Aggregator,
    Broadcast,
    HyperUpdate,
    LocalInference,
    Method,
    Posterior,
    component,
    hookimpl,
    option,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Cohort, LocalResult, Predictive, Problem


@component
class Tdamp(LocalInference):
    """Infer weights by approximate message passing over minibatches, without a learning rate.

    For networks of linear layers with rectifiers between them. Every sweep passes messages
    through all minibatches once; the posterior of one minibatch is the prior of the next.
    """

    name = "tdamp"
    reference = "Xu, Liu, Zhang & Lau 2024, Algorithm 1, eq. 15-27"
    family = "bernoulli-gaussian"

    local_epochs: int = option(10, "sweeps over a client's data per round (tau)", at_least=1)
    batch_size: int = option(100, "samples per minibatch; the last may be smaller", at_least=1)
    variance: float | None = option(
        None,
        "first prior variance of a bias and, divided by the inputs, of a weight; none: 10 for "
        "classes, 0.5 for a regression",
        above=0,
    )
    noise: float = option(1.0, "first variance of the observations' noise", above=0)
    rho: float = option(
        1.0,
        "first probability that a group of weights is not zero; 1: no group is ever switched off "
        "by the data",
        above=0,
        at_most=1,
    )
    forgetting: float = option(
        0.96,
        "share of the precision that the first sweep keeps (lambda)",
        above=0,
        at_most=1,
    )
    fading: float | None = option(
        None, "sweeps after which a sweep forgets half as much; none: always the same", above=0
    )
    momentum: float = option(
        0.8, "share of a minibatch's move that the next one repeats", at_least=0, below=1
    )
    pooled: bool = option(
        True,
        "count a client's samples as if all clients' were like them, so that the geometric mean "
        "by examples counts everybody's once a sweep; off: n_k / n times",
    )
    centred: bool = option(True, "expand every layer around its mean input")
    predictive: str = option(
        "moments",
        "what predicts: moments propagated through the network, or posterior means alone",
        choices=("moments", "mean"),
    )

    def keeps(self, sweeps: int) -> float:
        """Return lambda, the share of the precision that is kept after so many sweeps and one."""
        slower = 1 + sweeps / self.fading if self.fading else 1.0
        return 1 - (1 - self.forgetting) / slower

    def check(self, problem: Problem) -> None:
        """Refuse networks that are no chain, and outputs that do not match the targets."""
        from bfl_tdamp import prediction

        prediction.check(problem)

    def initial(self, problem: Problem) -> Posterior:
        """Return random means (symmetry must be broken) with wide variances."""
        from bfl_tdamp import message_passing

        return message_passing.initial(self, problem)

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return no velocity, and the posterior over the personal coordinates if there are any."""
        import torch

        own = super().remember(problem) if problem.layout.personal_total else {}
        return {**own, "velocity": torch.zeros_like(problem.initial)}

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Pass messages over every client's minibatches."""
        from bfl_tdamp import message_passing

        return message_passing.fit(self, problem, broadcast, cohort)

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict in closed form: no draws."""
        from bfl_tdamp import prediction

        return prediction.predict(self, problem, posterior, memory, x)


class EMTdamp(Method):
    """Learn a group-sparse network by message passing and expectation maximisation."""

    name = "em-tdamp"
    reference = "Xu, Liu, Zhang & Lau 2024, Algorithms 1 and 2"
    inference = Tdamp()
    aggregator = GeometricMean()
    hyper = EMGroupSparse()


@hookimpl
def bfl_posteriors() -> Iterator[type[Posterior]]:
    """Yield the family of group-sparse Gaussians."""
    yield BernoulliGaussian


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield message passing."""
    yield Tdamp


@hookimpl
def bfl_aggregators() -> Iterator[type[Aggregator]]:
    """Yield the geometric mean."""
    yield GeometricMean


@hookimpl
def bfl_hyper_updates() -> Iterator[type[HyperUpdate]]:
    """Yield the M-step."""
    yield EMGroupSparse


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield EM-TDAMP."""
    yield EMTdamp
