"""Laws that relate fusion rules to each other and to independent computations.

They raise `AssertionError` like those of `bflcore.testing.aggregation_laws`. The references are
numpy's linear algebra on the data itself.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from bflcore.aggregation import Aggregator
from bflcore.posteriors import Gaussian
from bflcore.testing.aggregation_laws import Case, close, gaussian, hold, rounding, tiny

__all__ = [
    "Regression",
    "consolidation_is_exact_bayes",
    "equal_weights_make_conflation",
    "heaviest_client_bounds_the_variance",
    "pool_is_rescaled_conflation",
    "product_is_weighted_least_squares",
    "variances_are_ordered",
]

Array = NDArray[np.float64]


def equal_weights_make_conflation(weighted: Aggregator, conflation: Aggregator, case: Case) -> None:
    """Weighted conflation under equal weights is conflation (law 5)."""
    equal = Case(case.posteriors, torch.full_like(case.weights, 0.2), case.prior)
    close(weighted, equal, equal.fused_by(weighted), equal.fused_by(conflation))


def pool_is_rescaled_conflation(pool: Aggregator, weighted: Aggregator, case: Case) -> None:
    """The log-linear pool is weighted conflation, its variance divided by max w (law 8)."""
    product = gaussian(case.fused_by(weighted))
    heaviest = float(case.weights.max() / case.weights.sum())
    expected = Gaussian(product.mean, product.variance / heaviest)
    close(pool, case, case.fused_by(pool), expected)


def variances_are_ordered(smaller: Aggregator, larger: Aggregator, case: Case) -> None:
    """The variances of one rule never exceed those of another (law 4)."""
    low = gaussian(case.fused_by(smaller)).variance.double()
    high = gaussian(case.fused_by(larger)).variance.double()
    hold(low <= high * (1 + 2 * rounding(case)) + tiny(case), "variances out of order", low, high)


def heaviest_client_bounds_the_variance(weighted: Aggregator, case: Case) -> None:
    """Weighted conflation is at least as certain as its heaviest client (law 4)."""
    fused = gaussian(case.fused_by(weighted)).variance.double()
    heaviest = gaussian(case.posteriors).variance[case.weights.argmax()].double()
    bound = heaviest * (1 + rounding(case)) + tiny(case)
    hold(fused <= bound, "variance, compared with the heaviest client's", fused, heaviest)


def product_is_weighted_least_squares(conflation: Aggregator, case: Case) -> None:
    """Conflation of K measurements is their weighted least squares estimate (law 10).

    Solved by numpy for each parameter: rows 1/sigma_k, targets (mu_k - mu_0)/sigma_k. Variances
    must be positive.
    """
    clients, fused = gaussian(case.posteriors), gaussian(case.fused_by(conflation))
    origin = case.prior.mean.double()
    means, variances = [], []
    for value, spread in zip(
        (clients.mean.double() - origin).T.numpy(), clients.variance.double().T.numpy(), strict=True
    ):
        rows = 1 / np.sqrt(spread)[:, None]
        means.append(np.linalg.lstsq(rows, value * rows[:, 0])[0][0])
        variances.append(np.linalg.inv(rows.T @ rows)[0, 0])
    expected = Gaussian(
        torch.tensor(np.array(means)) + origin, torch.tensor(np.array(variances))
    ).map(lambda tensor: tensor.to(fused.mean.dtype))
    close(conflation, case, fused, expected)


@attrs.frozen(eq=False)
class Regression:
    """Linear regression with known noise, divided among clients that share the prior.

    Client k holds ``x[k]`` ``[n_k, P]`` and ``y[k]`` ``[n_k]``, y = x theta + N(0, noise); the
    prior is N(prior_mean, diag(prior_variance)). Each row of x has a single nonzero entry: then
    every posterior is a product over parameters, as the rule assumes, and exact.
    """

    x: tuple[Array, ...]
    y: tuple[Array, ...]
    noise: float
    prior_mean: Array
    prior_variance: Array

    def posterior(self, clients: list[int]) -> tuple[Array, Array]:
        """Return mean ``[P]`` and covariance ``[P, P]`` given some clients' data."""
        x = np.concatenate([self.x[k] for k in clients])
        y = np.concatenate([self.y[k] for k in clients])
        precision = np.diag(1 / self.prior_variance) + x.T @ x / self.noise
        natural = self.prior_mean / self.prior_variance + x.T @ y / self.noise
        return np.linalg.solve(precision, natural), np.linalg.inv(precision)


def consolidation_is_exact_bayes(rule: Aggregator, problem: Regression, dtype: torch.dtype) -> None:
    """Consolidating clients' posteriors is the posterior of their pooled data (law 9)."""
    clients = list(range(len(problem.x)))
    found = [problem.posterior([k]) for k in clients]
    posteriors = Gaussian(
        torch.tensor(np.array([mean for mean, _ in found])).to(dtype),
        torch.tensor(np.array([np.diag(covariance) for _, covariance in found])).to(dtype),
    )
    prior = Gaussian(
        torch.tensor(problem.prior_mean).to(dtype), torch.tensor(problem.prior_variance).to(dtype)
    )
    fused = gaussian(rule.fuse(posteriors, torch.ones(len(clients)), prior))
    mean, covariance = problem.posterior(clients)
    variance = np.diag(covariance)
    # The clients' variances are rounded to the dtype before they are fused, and K precisions of
    # about the prior's cancel: the relative error is K roundings over what remains.
    eps = torch.finfo(dtype).eps
    lost = 4 * eps * (1 + variance * sum(1 / np.diag(c) for _, c in found))
    reach = np.abs([m for m, _ in found]).max(0) + np.abs(problem.prior_mean) + np.abs(mean)
    learnt = np.sum([np.abs(m - problem.prior_mean) / np.diag(c) for m, c in found], axis=0)
    error = np.abs(fused.mean.double().numpy() - mean)
    underflow = 100 * torch.finfo(dtype).tiny
    allowed = (
        underflow
        + lost * np.abs(mean - problem.prior_mean)
        + 4 * eps * (reach + variance * (learnt + sum(reach / np.diag(c) for _, c in found)))
    )
    hold(torch.tensor(error <= allowed), "mean", fused.mean, torch.tensor(mean))
    excess = np.abs(fused.variance.double().numpy() - variance) <= lost * variance
    hold(torch.tensor(excess), "variance", fused.variance, torch.tensor(variance))
