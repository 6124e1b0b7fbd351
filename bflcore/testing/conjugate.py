"""A linear regression whose posterior is known, and clients that solve their part of it exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bflcore.inference.sites import SiteInference
from bflcore.options import component, option
from bflcore.posteriors import Gaussian, Posterior
from bflcore.problem.likelihoods import GaussianNoise
from bflcore.testing import problems

if TYPE_CHECKING:
    from bflcore.messages import Broadcast, Cohort
    from bflcore.problem.base import Problem
    from bflcore.problem.likelihoods import Predictive

__all__ = ["NOISE", "ExactSites", "pooled", "regression"]

NOISE = 0.5  # variance of the targets


@component
class ExactSites(SiteInference):
    """Fit the best mean-field Gaussian of a linear regression with known noise, in closed form.

    The minimum of KL(q || cavity times likelihood) has the mean of the exact posterior and, for
    each parameter, its precision given all others: cavity + sum_i x_i^2 / noise.
    """

    name = "exact-sites"
    reference = "Bishop 2006, eq. 10.12-10.15"
    family = "gaussian"

    damping: float = option(1.0, "share of a change that is made", above=0, at_most=1)
    momentum: float = option(0.0, "share of the last change", at_least=0, below=1)
    prior_mean: float = option(0.2, "mean of the first prior")
    prior_variance: float = option(2.0, "variance of the first prior", above=0)

    def initial(self, problem: Problem) -> Gaussian:
        """Return the first prior ``[P]``."""
        mean = torch.full_like(problem.initial, self.prior_mean)
        return Gaussian(mean, torch.full_like(mean, self.prior_variance))

    def tilt(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, cavity: Posterior
    ) -> tuple[Gaussian, Tensor]:
        """Return the clients' Gaussians ``[K, P]``; the loss ``[K]`` is not computed."""
        assert isinstance(cavity, Gaussian)  # noqa: S101 - of `initial`
        found = []
        for row, size in enumerate(cohort.sizes):
            x, y = cohort.x[row, :size].double(), cohort.y[row, :size].double()
            precision, shift = cavity[row].map(Tensor.double).natural().values()
            full = precision.diag() + x.mT @ x / NOISE
            mean = torch.linalg.solve(full, shift + (x.mT @ y).flatten() / NOISE)
            found.append(Gaussian(mean[None], full.diagonal()[None].reciprocal()))
        fitted = Gaussian.concatenate(found).map(lambda t: t.to(problem.initial.dtype))
        return fitted, fitted.mean.new_zeros(len(found))

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict with the posterior mean."""
        mean = broadcast.start.mean.expand(len(cohort.clients), -1)
        return problem.likelihood.predictive(problem.forward(mean, x)[:, None])


def regression(
    sizes: Sequence[int] = (6, 5, 4, 3),
    inputs: int = 3,
    condition: float = 1.0,
    dtype: torch.dtype = torch.float64,
    sharing: str = "all",
    scale: float = 1.0,
) -> Problem:
    """Return a regression on `inputs` features of a covariance with this `condition` number.

    Client k holds ``sizes[k]`` samples. `scale` multiplies the features.
    """
    x = scale * problems.normal(sum(sizes), inputs, seed=3)
    if condition > 1:
        turned = torch.linalg.qr(problems.normal(inputs, inputs, seed=6)).Q
        spread = torch.logspace(0, -1, inputs, condition, dtype=torch.float64)
        x = x @ (turned * (spread * inputs / spread.sum()).sqrt()).mT
    noise = NOISE**0.5 * problems.normal(sum(sizes), 1, seed=5)
    return problems.separable(
        sizes,
        network=nn.Sequential(nn.Linear(inputs, 1, bias=False)),
        likelihood=GaussianNoise(noise_variance=NOISE),
        data=(x, x @ problems.normal(inputs, 1, seed=4) + noise),
        dtype=dtype,
        sharing=sharing,
    )


def pooled(of: Problem, prior: Gaussian) -> tuple[Tensor, Tensor]:
    """Return mean ``[P]`` and precision ``[P, P]`` of the posterior given all clients' data."""
    x, y = of.train.x.double(), of.train.y.double()
    precision, shift = prior.map(Tensor.double).natural().values()
    full = precision.diag() + x.mT @ x / NOISE
    return torch.linalg.solve(full, shift + (x.mT @ y).flatten() / NOISE), full
