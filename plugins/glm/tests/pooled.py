"""Designs with correlated columns, divided among clients, and analyses of the pooled samples."""

from __future__ import annotations

import numpy as np

SIZES = (60, 45, 40, 40, 35, 30, 30, 25, 20, 5)
COLUMNS = 6


def design(seed=0, sizes=SIZES, columns=COLUMNS):
    """Return standardised, correlated columns ``[N, F]``, and the clients ``[N]``."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(sizes), columns))
    x[:, 1] = x[:, 0] + 0.12 * x[:, 1]
    x[:, 3] = x[:, 2] - x[:, 0] + 0.3 * x[:, 3]
    x = (x - x.mean(0)) / x.std(0)
    return x, np.repeat(np.arange(len(sizes)), sizes)


def condition(x):
    """Return the condition number of X^T X."""
    return np.linalg.cond(x.T @ x)


def with_intercept(x):
    """Return the design as a linear layer's parameters have it: weights first, then the bias."""
    return np.hstack([x, np.ones((len(x), 1))])


def gaussian_posterior(x, y, noise, prior_sigma):
    """Return mean ``[P]`` and covariance ``[P, P]`` of the pooled linear regression."""
    design = with_intercept(x)
    precision = design.T @ design / noise + np.eye(design.shape[1]) / prior_sigma**2
    covariance = np.linalg.inv(precision)
    return np.linalg.solve(precision, design.T @ y / noise), covariance


def newton(x, y, prior_sigma, derivatives, intercept=0.0, steps=100):
    """Return mode ``[P]`` and inverse Hessian ``[P, P]`` of a pooled canonical GLM.

    `derivatives` gives the samples' losses, slopes and curvatures by their predictors ``[N]``.
    Newton steps from the `intercept` alone are halved until the objective falls.
    """
    design, w = with_intercept(x), np.zeros(x.shape[1] + 1)
    w[-1] = intercept

    def objective(w):
        return derivatives(design @ w, y)[0].sum() + 0.5 * w @ w / prior_sigma**2

    for _ in range(steps):
        _, slope, bend = derivatives(design @ w, y)
        gradient = design.T @ slope + w / prior_sigma**2
        hessian = design.T @ (bend[:, None] * design) + np.eye(len(w)) / prior_sigma**2
        step = np.linalg.solve(hessian, gradient)
        while objective(w - step) > objective(w) + 1e-12 and np.abs(step).max() > 1e-14:
            step = step / 2
        w = w - step
    return w, np.linalg.inv(hessian)


def logistic(predictor, y):
    p = 1 / (1 + np.exp(-predictor))
    return np.logaddexp(0, predictor) - y * predictor, p - y, p * (1 - p)


def counts(predictor, y):
    rate = np.exp(predictor)
    return rate - y * predictor, rate - y, rate
