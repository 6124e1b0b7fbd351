"""The methods `superfed-mm` and `superfed-lm`, and their inference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bflcore import GradientInference, Method, component, evolve, hookimpl, option
from bflcore.models import TwoNN

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


@component
class LowLossSubspace(GradientInference):
    """Train a federated and a local model so that every mixture of the two works (eq. 3).

    Minimises NLL(W(lambda)) per sample + mu * prox(w_f, w_g) + nu * cos(w_f, w_l)^2 with
    W(lambda) = (1 - lambda) w_f + lambda w_l, lambda ~ U(0, 1) anew for every minibatch.
    """

    name = "low-loss-subspace"
    reference = "Hahn, Jeong & Lee 2022 (SuPerFed), eq. 3, sections 3.4 and 3.5"
    family = "point"

    mixing: str = option(
        "model", "one lambda for the model, or one a layer", choices=("model", "layer")
    )
    mu: float = option(0.01, "pull of the federated model to the server's", at_least=0)
    nu: float = option(1.0, "push of the two models towards orthogonality", at_least=0)
    prox: str = option(
        "squared",
        "the pull's form: half the squared distance, or the sum over layers of distances",
        choices=("squared", "norm"),
    )
    start: float = option(
        0.4, "share of the rounds after which the local model joins (L)", at_least=0, at_most=1
    )
    lambda_selection: str = option(
        "validation",
        "the lambda that predicts: best on held-out training samples, fixed, or all averaged",
        choices=("validation", "fixed", "ensemble"),
    )
    ensemble_prior: str = option(
        "falling",
        "density of lambda under `ensemble`: uniform, or 2 (1 - lambda), nearer the federated end",
        choices=("falling", "uniform"),
    )
    fixed_lambda: float = option(
        0.5, "lambda of `fixed`, and where nothing validates", at_least=0, at_most=1
    )
    validation_fraction: float = option(
        0.1, "share of training samples held out to choose lambda", above=0, below=1
    )
    weight_decay: float = option(0.0, "strength of the quadratic pull to zero", at_least=0)

    def personal(self, problem: Problem, round: int) -> bool:
        """Return whether the local model takes part in a round (counted from 0).

        It does from round floor(L R) on; where R is not known, from the first.
        """
        begin = math.floor(self.start * problem.rounds + 1e-9)  # 0.29 * 100 is 28.999...
        return self.start < 1 and round >= begin

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's random initialisation as a point."""
        from bflcore.posteriors import Point

        return Point(problem.initial)

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client without a local model yet."""
        from bfl_superfed import subspace

        return subspace.remember(self, problem)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train both models, or the federated one alone before personalisation starts."""
        from bfl_superfed import subspace

        return subspace.fit(self, problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Choose lambda; a novel client first trains a local model that starts from w_g."""
        from bfl_superfed import prediction

        return prediction.personalise(self, problem, broadcast, cohort, novel)

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict with W(lambda), or average over lambdas."""
        from bfl_superfed import prediction

        return prediction.predict(self, problem, posterior, memory, x)

    def curves(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Mapping[str, Mapping[float, Predictive]]:
        """Predict with every lambda of the grid."""
        from bfl_superfed import prediction

        return {"lambda": prediction.along_the_segment(problem, posterior, memory, x)}

    def landmarks(
        self, problem: Problem, posterior: Posterior, memory: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the ends of the segment."""
        from bfl_superfed import prediction

        federated, local = prediction.ends(problem, posterior, memory)
        return {"federated": federated, "local": local}


class SuPerFedMM(Method):
    """Share a model, keep another, and mix them with one random lambda (model mixing)."""

    name = "superfed-mm"
    reference = "Hahn, Jeong & Lee 2022, Algorithm 1"
    # Table A1: SGD whose learning rate falls 1 % per round, ten epochs of minibatches of ten.
    inference = LowLossSubspace(
        nu=1.0,
        optimiser="sgd",
        momentum=0.9,
        weight_decay=1e-4,
        lr=0.01,
        lr_decay=0.01,
        local_epochs=10,
        batch_size=10,
    )
    model = TwoNN()
    settings = {"cohort": 5}


class SuPerFedLM(Method):
    """Share a model, keep another, and mix them with one random lambda a layer (layer mixing)."""

    name = "superfed-lm"
    reference = "Hahn, Jeong & Lee 2022, Algorithm 1"
    inference = evolve(SuPerFedMM.inference, mixing="layer", nu=2.0)
    model = SuPerFedMM.model
    settings = SuPerFedMM.settings


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference of eq. 3."""
    yield LowLossSubspace


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield both ways to mix."""
    yield SuPerFedMM
    yield SuPerFedLM
