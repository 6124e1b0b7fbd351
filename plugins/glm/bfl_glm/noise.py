"""The variance of Gaussian noise, estimated from sums over the clients.

With the products Z^T Z of z = (x, 1, y), summed over all clients before round 1, the residuals of
the pooled least-squares fit are known without a sample: RSS = y^T y - y^T X (X^T X)^+ X^T y, and
s = RSS / (n - p) is the unbiased estimate of the variance (Seber & Lee 2003, section 3.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore import GaussianNoise
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Cohort, Problem
else:
    torch = lazy("torch")

__all__ = ["PRODUCTS", "products", "with_estimated_noise"]

PRODUCTS = "products"  # the answer to the survey
SMALLEST = 1e-12  # variance, of targets that the columns give exactly


def products(cohort: Cohort) -> Tensor:
    """Return Z^T Z ``[K, D, D]`` in float64 of z = (x, 1, y), D = F + 1 + T."""
    found = []
    for row, size in enumerate(cohort.sizes):
        x, y = cohort.x[row, :size].double(), cohort.y[row, :size].double()
        z = torch.cat([x, x.new_ones(size, 1), y], 1)
        found.append(z.mT @ z)
    return torch.stack(found)


def with_estimated_noise(problem: Problem) -> Problem:
    """Return the problem with the noise that the survey's products give.

    The problem is unchanged before the survey, with other noise than Gaussian, and where there are
    no more samples than coefficients.
    """
    if PRODUCTS not in problem.survey or not isinstance(problem.likelihood, GaussianNoise):
        return problem
    total, targets = problem.survey[PRODUCTS], problem.train.y.shape[-1]
    inputs = len(total) - targets
    samples = float(total[inputs - 1, inputs - 1])
    if samples <= inputs:
        return problem
    gram, moments, squares = (
        total[:inputs, :inputs],
        total[:inputs, inputs:],
        total[inputs:, inputs:].diagonal(),
    )
    fit = torch.linalg.pinv(gram, hermitian=True) @ moments
    residual = float((squares - (moments * fit).sum(0)).sum())
    variance = max(SMALLEST, residual / (targets * (samples - inputs)))
    likelihood = problem.likelihood.replace(noise_variance=variance)
    return attrs.evolve(problem, likelihood=likelihood)
