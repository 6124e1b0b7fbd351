"""Sites with a precision matrix: the exact posterior, or Laplace's approximation of it.

Each client replaces the negative log likelihood of its samples by a quadratic. The product of the
prior and all sites is then the posterior of the pooled quadratics: one Newton step of the pooled
problem per round, whoever takes part in it (an incremental Newton method; Gurbuzbalaban, Ozdaglar &
Parrilo 2015, eq. 1.4), and in the end the Laplace approximation of the pooled posterior.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bfl_glm import newton
from bfl_glm.curvature import Expansion, expand, loss
from bfl_glm.design import check_columns, is_linear
from bfl_glm.noise import PRODUCTS, products, with_estimated_noise
from bflcore import DenseGaussian, GaussianNoise, OptionError, component, option
from bflcore.inference.memory import client_posterior, join_personal
from bflcore.inference.normals import Noise
from bflcore.inference.sites import SiteInference
from bflcore.lazy import lazy
from bflcore.posteriors.dense import check_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, Posterior, Predictive, Problem
else:
    torch = lazy("torch")

__all__ = ["DenseSites", "Laplace", "LinearGaussian", "QuadraticSites"]


@component
class QuadraticSites(SiteInference):
    """Base of inferences that replace each client's loss by a quadratic.

    Subclasses define `prior` and `posterior_of`.
    """

    prior_sigma: float = option(
        10.0, "standard deviation of the zero-mean prior of every parameter", above=0
    )
    predict_draws: int = option(50, "parameter draws averaged per prediction (S)", at_least=1)

    def initial(self, problem: Problem) -> Posterior:
        """Return the prior's precision around the network's initialisation ``[P]``."""
        prior = self.prior(problem)
        return prior.unpack(prior.pack() | {"mean": problem.initial})

    def tilt(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, cavity: Posterior
    ) -> tuple[Posterior, Tensor]:
        """Return each client's posterior ``[K, P]``, and its mean loss where it was expanded."""
        start = join_personal(problem, broadcast.start, cohort).mean
        problem = with_estimated_noise(problem)
        found = []
        for row, size in enumerate(cohort.sizes):
            x, y = cohort.x[row, :size].double(), cohort.y[row, :size]
            y = y.double() if y.is_floating_point() else y
            exact = cavity[row].map(lambda t: t.double())
            found.append(self.posterior_of(problem, start[row].double(), x, y, exact))
        packed = [one.pack() for one, _ in found]
        fields = {n: torch.stack([one[n] for one in packed]).to(start.dtype) for n in packed[0]}
        return cavity.unpack(fields), start.new_tensor([mean for _, mean in found])

    @abc.abstractmethod
    def posterior_of(
        self, problem: Problem, start: Tensor, x: Tensor, y: Tensor, cavity: Any
    ) -> tuple[Posterior, float]:
        """Return one client's posterior ``[P]`` in float64, and its mean loss in nats per sample.

        `start` ``[P]`` is the mean of the posterior that all clients agree on; `x` ``[N, ...]``,
        `y` ``[N]`` or ``[N, T]``.
        """

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Average over `predict_draws` parameter draws, the same for all samples of a client."""
        whole = client_posterior(problem, broadcast, cohort)
        shape = (len(whole.mean), self.predict_draws, problem.layout.total)
        noise = Noise(cohort.streams("predict")).fill(whole.mean.new_empty(shape))
        draws = torch.stack([whole[row].sample(one) for row, one in enumerate(noise)])
        likelihood = with_estimated_noise(problem).likelihood
        return likelihood.predictive(problem.outputs(draws, x))


@component
class DenseSites(QuadraticSites):
    """Base of inferences whose sites have a precision matrix."""

    family = "dense-gaussian"

    collinear: str = option(
        "refuse",
        "columns that are combinations of others: refused, or allowed (the prior decides)",
        choices=("refuse", "allow"),
    )
    noise: str = option(
        "likelihood",
        "variance of Gaussian noise: the likelihood's, or estimated from the residuals of the "
        "pooled least-squares fit (for linear models)",
        choices=("likelihood", "estimated"),
    )

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` for too many parameters, or columns that determine each other."""
        check_size(problem.layout)
        if self._estimates(problem) and not is_linear(problem):
            raise OptionError(
                "inference.noise: estimated is for models that are linear in their parameters; "
                "choose --model linear, or -o inference.noise=likelihood"
            )
        if self.collinear == "refuse" and is_linear(problem):
            check_columns(problem)

    def survey(self, problem: Problem, cohort: Cohort) -> Mapping[str, Tensor]:
        """Return the number of samples ``[K]`` and, to estimate noise, products ``[K, D, D]``."""
        found = dict(super().survey(problem, cohort))
        return found | {PRODUCTS: products(cohort)} if self._estimates(problem) else found

    def _estimates(self, problem: Problem) -> bool:
        return self.noise == "estimated" and isinstance(problem.likelihood, GaussianNoise)

    def prior(self, problem: Problem) -> DenseGaussian:
        """Return N(0, prior_sigma^2) ``[P]``."""
        eye = torch.diag(torch.full_like(problem.initial, self.prior_sigma**-2))
        return DenseGaussian(torch.zeros_like(problem.initial), eye)


@component
class LinearGaussian(DenseSites):
    """Compute the exact posterior of a linear model whose noise has a known variance.

    precision = prior precision + X^T X / s, shift = prior shift + X^T y / s.
    """

    name = "linear-gaussian"
    reference = "Bishop 2006, eq. 3.50-3.51; sites: Bui et al. 2018"
    tags = frozenset({"exact-conjugate"})

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` unless the outputs are linear in the parameters."""
        super().check(problem)
        if not isinstance(problem.likelihood, GaussianNoise):
            raise OptionError(
                f"--inference: linear-gaussian needs the likelihood gaussian, not "
                f"{problem.likelihood.name}; allowed for others: laplace"
            )
        if not is_linear(problem):
            raise OptionError(
                "--inference: linear-gaussian needs a model that is linear in its parameters; "
                "this one is not; choose --model linear, or --inference laplace"
            )

    def posterior_of(
        self, problem: Problem, start: Tensor, x: Tensor, y: Tensor, cavity: DenseGaussian
    ) -> tuple[DenseGaussian, float]:
        """Return Bayes' posterior ``[P]``: the loss is quadratic, wherever it is expanded."""
        around = expand(problem, torch.zeros_like(start), x, y)
        posterior = _updated(around, torch.zeros_like(start), cavity)
        return posterior, loss(problem, start, x, y) / max(1, len(x))


@component
class Laplace(DenseSites):
    """Approximate by a Gaussian: a Newton step around the mean that all clients agree on.

    precision = prior precision + X^T W X, where W are the second derivatives of the loss by the
    outputs. Where the step would raise the client's own objective, its loss is expanded around the
    mode of its own posterior instead. Both have the same fixed point: the mode of the pooled
    posterior, with its curvature.
    """

    name = "laplace"
    reference = (
        "Tierney & Kadane 1986; MacKay 1992; sites: Smola et al. 2004 (Laplace propagation), "
        "Swaroop et al. 2025 (FedLap-Cov)"
    )

    def posterior_of(
        self, problem: Problem, start: Tensor, x: Tensor, y: Tensor, cavity: DenseGaussian
    ) -> tuple[DenseGaussian, float]:
        """Return the Gaussian ``[P]`` of the client's expanded loss, and its loss at the start."""
        return newton.posterior_of(
            start,
            len(x),
            partial(loss, problem, x=x, y=y),
            partial(_penalty, cavity=cavity),
            partial(expand, problem, x=x, y=y),
            partial(_updated, cavity=cavity),
        )


def _updated(around: Expansion, start: Tensor, cavity: DenseGaussian) -> DenseGaussian:
    """Return the cavity ``[P]`` times the exponential of minus the expansion around `start`.

    The mean is a step from `start`: near the mode, no digits of it are lost.
    """
    before = cavity.precision.double()
    precision = before + around.curvature
    downhill = before @ (cavity.mean.double() - start) - around.gradient
    step = DenseGaussian.from_natural({"precision": precision, "shift": downhill}).mean
    return DenseGaussian(start + step, precision)


def _penalty(weights: Tensor, cavity: DenseGaussian) -> float:
    """Return minus the cavity's log density at `weights` ``[P]`` in nats, up to a constant."""
    apart = weights - cavity.mean.double()
    return 0.5 * float(apart @ cavity.precision.double() @ apart)
