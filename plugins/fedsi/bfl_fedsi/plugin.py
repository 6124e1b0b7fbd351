"""The methods `fedsi` and `fedsi-fac`, and the inference they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from bflcore import Continual, Equal, GradientInference, Method, component, evolve, hookimpl, option

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

SELECTIONS = ("variance", "curvature-aware", "informative", "random")


@component
class SubnetworkLaplace(GradientInference):
    """Fit a MAP, then a full-covariance Gaussian over a small subnetwork by linearised Laplace.

    What travels is the MAP of every shared parameter and its variance, 0 outside the subnetwork.
    Personal parameters stay as they were initialised while clients train, and are fine-tuned on
    the client's own data before it predicts.
    """

    name = "subnetwork-laplace"
    family = "gaussian"
    reference = "Chen et al. 2024 (FedSI), eq. 10, 14, 15, 17-19; Daxberger et al. 2021"
    expected_failures = MappingProxyType(
        {
            "no data gives the prior back": "the variance that travels is 0 outside the "
            "subnetwork, also of a client without data (step 4 of Algorithm 1)"
        }
    )

    prior_variance: float = option(
        1e-4, "prior variance (alpha), at first and wherever the prior's is zero", above=0
    )
    fraction: float = option(
        0.05, "share of the travelling parameters in the subnetwork (E)", above=0, at_most=1
    )
    select: str = option(
        "variance",
        "the subnetwork of a round: largest posterior variances (eq. 14), the largest among "
        "parameters with curvature, those whose variance the data say most about, or random",
        choices=SELECTIONS,
    )
    predict_select: str = option(
        "variance", "the subnetwork of a prediction, chosen likewise", choices=SELECTIONS
    )
    covariance: str = option(
        "auto",
        "side on which the covariance is computed: parameters (primal), samples (dual) or the "
        "smaller; diagonal leaves correlations out",
        choices=("auto", "primal", "dual", "diagonal"),
    )
    predictive: str = option(
        "probit",
        "closed form, draws of the linearised outputs, or no uncertainty",
        choices=("probit", "mc", "mean"),
    )
    predict_draws: int = option(100, "draws of predictive mc", at_least=1)
    head_epochs: int = option(10, "passes that fine-tune the personal parameters", at_least=0)
    head_lr: float = option(1e-2, "learning rate of fine-tuning", above=0)
    head_weight_decay: float = option(
        0.0, "quadratic pull to zero of fine-tuning, per sample", at_least=0
    )
    noise: str = option(
        "learned",
        "variance of a regression's noise: each client's mean squared residual after "
        "fine-tuning, or the likelihood's",
        choices=("learned", "likelihood"),
    )

    def check(self, problem: Problem) -> None:
        """Refuse a network without travelling parameters and a subnetwork beyond memory."""
        from bfl_fedsi import limits

        limits.check(self, problem)

    def initial(self, problem: Problem) -> Posterior:
        """Return N(initialisation, prior_variance); the personal parameters are certain."""
        from bfl_fedsi import fedsi

        return fedsi.initial(self, problem)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Find every client's MAP and the variances of its subnetwork."""
        from bfl_fedsi import fedsi

        return fedsi.fit(self, problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Fine-tune the personal parameters and infer the subnetwork around the global mean."""
        from bfl_fedsi import fedsi

        return fedsi.personalise(self, problem, broadcast, cohort)

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict with the linearised network (eq. 17-19)."""
        from bfl_fedsi import fedsi

        return fedsi.predict(self, problem, posterior, memory, x, streams)


class FedSI(Method):
    """Share a body whose subnetwork is Gaussian; fine-tune a point-estimate head at the end."""

    name = "fedsi"
    reference = "Chen, Liu, Wu, Fan & Cao 2024, Algorithm 1"
    # Options and rounds were chosen on Fashion-MNIST; the README says what each is worth.
    inference = SubnetworkLaplace(prior_variance=0.1, head_lr=3e-3, predict_select="informative")
    weighting = Equal()
    hyper = Continual(zero_variance=0.0)  # 0 leaves alpha to inference.prior_variance
    share = "body"
    settings = {"rounds": 60}


class FedSIFac(Method):
    """FedSI with a diagonal covariance over the whole body."""

    name = "fedsi-fac"
    reference = "Chen, Liu, Wu, Fan & Cao 2024, section on ablations"
    inference = evolve(FedSI.inference, fraction=1.0, covariance="diagonal")
    weighting = FedSI.weighting
    hyper = FedSI.hyper
    share = FedSI.share
    settings = FedSI.settings


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the subnetwork inference."""
    yield SubnetworkLaplace


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield FedSI and its factorised variant."""
    yield FedSI
    yield FedSIFac
