"""Sites with a precision matrix: after every client's first reply, the pooled posterior itself."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from torch import nn

from bfl_glm.likelihoods import Bernoulli, Poisson
from bfl_glm.sites import Laplace, LinearGaussian
from bflcore import (
    Categorical,
    Continual,
    Equal,
    GaussianNoise,
    Layout,
    OptionError,
    Problem,
    ProductOfChanges,
    Shares,
)
from bflcore.engines.faults import simulate_faults
from bflcore.engines.local import Local
from bflcore.experiments.surveys import survey
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import normal

from .pooled import SIZES, condition, counts, design, gaussian_posterior, logistic, newton

NOISE, SIGMA = 0.5, 3.0


def federated(x, y, client, likelihood, outputs=1, dtype=torch.float64, network=None):
    """Return the problem of these samples, each with the client that holds it."""
    network = network or nn.Linear(x.shape[1], outputs)
    for parameter in network.parameters():
        parameter.data.zero_()
    network = network.to(dtype)
    layout = Layout.of(network)
    targets = torch.as_tensor(y)
    shares = Shares.gather(
        torch.as_tensor(x).to(dtype),
        targets.to(dtype) if targets.is_floating_point() else targets,
        [np.flatnonzero(client == k) for k in range(client.max() + 1)],
    )
    initial = layout.flatten(dict(network.named_parameters()))
    clients = tuple(range(client.max() + 1))
    return Problem(network, layout, likelihood, shares, shares, initial, clients)


def posteriors(problem, inference, rounds, drop_out=0.0, workers=1, damping=1.0):
    """Yield the server's posterior after each round, and the clients that have replied so far."""
    recipe = Recipe(inference, ProductOfChanges(), Equal(), Continual())
    seen = set()
    with Local(workers=workers).open(problem, inference, bins=1) as opened:
        session = simulate_faults(opened, 3, drop_out, 0.0)
        of = problem.surveyed(survey(inference, problem, opened).sums)
        broadcast = begin(recipe, of)
        for _ in range(rounds):
            done = run_round(recipe, session, broadcast, problem.clients, trust=0.0)
            broadcast = done.broadcast
            seen |= set(done.replied)
            yield broadcast.start, frozenset(seen)


def regression(dtype=torch.float64):
    x, client = design()
    y = x @ np.linspace(-1, 1, x.shape[1]) + 0.3 + np.sqrt(NOISE) * normal(len(x), seed=9).numpy()
    x, y = (torch.as_tensor(each).to(dtype).double().numpy() for each in (x, y))
    return x, y, federated(x, y[:, None], client, GaussianNoise(noise_variance=NOISE), dtype=dtype)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["double", "float"]
)
def test_linear_regression_is_pooled_once_each_client_has_replied(dtype, tolerance, workers):
    x, y, problem = regression(dtype)
    assert condition(x) > 100
    assert min(SIZES) == 5
    assert len(SIZES) == 10
    mean, covariance = gaussian_posterior(x, y, NOISE, SIGMA)
    inference = LinearGaussian(prior_sigma=SIGMA)
    complete = 0
    for q, seen in posteriors(problem, inference, rounds=12, drop_out=0.3, workers=workers):
        apart = abs(q.mean.double().numpy() - mean).max()
        spread = abs(q.map(torch.Tensor.double).covariance.numpy() - covariance).max()
        if len(seen) < len(SIZES):
            assert apart > 100 * tolerance
            continue
        complete += 1
        assert apart < tolerance
        assert spread < tolerance
    assert complete > 3


def test_the_posterior_of_some_clients_is_that_of_their_samples():
    x, y, problem = regression()
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    q, seen = next(posteriors(problem, LinearGaussian(prior_sigma=SIGMA), 1, drop_out=0.5))
    assert 0 < len(seen) < len(SIZES)
    rows = np.isin(client, list(seen))
    mean, covariance = gaussian_posterior(x[rows], y[rows], NOISE, SIGMA)
    np.testing.assert_allclose(q.mean, mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(q.covariance, covariance, rtol=0, atol=1e-12)


def binary(seed=0):
    x, client = design(seed)
    p = 1 / (1 + np.exp(-(x @ np.linspace(-1, 1, x.shape[1]) - 0.5)))
    y = (np.random.default_rng(seed).random(len(x)) < p).astype(np.int64)
    return x, y, federated(x, y, client, Bernoulli())


def counted(offset=0.5):
    x, client = design(1)
    rate = np.exp(0.3 * x @ np.linspace(-1, 1, x.shape[1]) + offset)
    y = np.random.default_rng(1).poisson(rate).astype(float)
    return x, y, federated(x, y[:, None], client, Poisson())


@pytest.mark.parametrize(
    ("made", "derivatives"), [(binary, logistic), (counted, counts)], ids=["logistic", "poisson"]
)
@pytest.mark.parametrize("drop_out", [0.0, 0.3])
def test_the_mode_and_the_covariance_are_those_of_the_pooled_fit(made, derivatives, drop_out):
    x, y, problem = made()
    mode, covariance = newton(x, y, SIGMA, derivatives)
    *_, (q, _) = posteriors(problem, Laplace(prior_sigma=SIGMA), 20, drop_out)
    np.testing.assert_allclose(q.mean, mode, rtol=0, atol=1e-6)
    np.testing.assert_allclose(q.covariance, covariance, rtol=0, atol=1e-4 * covariance.max())


def test_logistic_regression_is_that_of_scikit_learn():
    x, y, problem = binary()
    *_, (q, _) = posteriors(problem, Laplace(prior_sigma=SIGMA), 12)
    # The intercept is a column, so that it is penalised as the coefficients are.
    pooled = LogisticRegression(C=SIGMA**2, fit_intercept=False, tol=1e-12, max_iter=10_000)
    pooled.fit(np.hstack([x, np.ones((len(x), 1))]), y)
    np.testing.assert_allclose(q.mean, pooled.coef_[0], rtol=0, atol=1e-6)


def test_poisson_regression_is_that_of_scikit_learn():
    x, y, problem = counted()
    *_, (q, _) = posteriors(problem, Laplace(prior_sigma=SIGMA), 12)
    alpha = 1 / (SIGMA**2 * len(x))  # of a penalty on the mean loss
    pooled = PoissonRegressor(
        alpha=alpha, fit_intercept=False, solver="newton-cholesky", tol=1e-10, max_iter=1_000
    )
    pooled.fit(np.hstack([x, np.ones((len(x), 1))]), y)
    np.testing.assert_allclose(q.mean, pooled.coef_, rtol=0, atol=1e-6)


def test_convergence_is_quadratic_when_all_clients_reply():
    x, y, problem = binary()
    mode, _ = newton(x, y, SIGMA, logistic)
    errors = [
        abs(q.mean.numpy() - mode).max()
        for q, _ in posteriors(problem, Laplace(prior_sigma=SIGMA), 7)
    ]
    close = [error for error in errors if 1e-9 < error < 0.1]
    assert len(close) > 1
    for before, after in pairwise(errors):
        if 1e-7 < before < 0.1:
            assert after < 2 * before**2 + 1e-12


@pytest.mark.parametrize("offset", [5.0, 9.0])
def test_large_counts_do_not_overshoot_from_a_rate_of_one(offset):
    x, y, problem = counted(offset)
    mode, covariance = newton(x, y, 10.0, counts, intercept=offset)
    *_, (q, _) = posteriors(problem, Laplace(prior_sigma=10.0), 20)
    np.testing.assert_allclose(q.mean, mode, rtol=0, atol=1e-6)
    np.testing.assert_allclose(q.covariance, covariance, rtol=0, atol=1e-4 * covariance.max())


def test_classes_of_one_client_alone_do_not_run_away():
    x, client = design()
    y = (client % 2).astype(np.int64)  # every client has one class only
    problem = federated(x, y, client, Bernoulli())
    mode, _ = newton(x, y, SIGMA, logistic)
    *_, (q, _) = posteriors(problem, Laplace(prior_sigma=SIGMA), 20, drop_out=0.3)
    np.testing.assert_allclose(q.mean, mode, rtol=0, atol=1e-6)


def test_softmax_regression_has_the_hessian_of_autograd():
    x, client = design()
    y = np.random.default_rng(3).integers(3, size=len(x))
    problem = federated(x, y, client, Categorical(), outputs=3)
    *_, (q, _) = posteriors(problem, Laplace(prior_sigma=SIGMA), 12)
    of, targets = torch.as_tensor(x), torch.as_tensor(y)

    def objective(w):
        outputs = problem.forward(w[None], of[None])[0]
        nll = nn.functional.cross_entropy(outputs, targets, reduction="sum")
        return nll + 0.5 * w.square().sum() / SIGMA**2

    slope = torch.func.grad(objective)(q.mean)
    assert float(slope.abs().max()) < 1e-8
    hessian = torch.autograd.functional.hessian(objective, q.mean)
    torch.testing.assert_close(q.precision, hessian, rtol=1e-8, atol=1e-8)


def test_more_parameters_than_a_matrix_can_be_kept_of_are_refused():
    x = np.zeros((20, 4_000))
    problem = federated(x, np.zeros((20, 1)), np.repeat([0, 1], 10), GaussianNoise())
    with pytest.raises(OptionError, match="4,001 parameters"):
        Laplace().check(problem)


@pytest.mark.parametrize(
    ("network", "likelihood", "match"),
    [
        (None, Categorical(), "needs the likelihood gaussian, not categorical"),
        (
            partial(nn.Sequential, nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)),
            GaussianNoise(),
            "linear in its parameters; this one is not",
        ),
    ],
)
def test_what_is_not_linear_and_gaussian_is_refused(network, likelihood, match):
    x, client = design()
    made = network() if network else None
    problem = federated(x, np.zeros((len(x), 1)), client, likelihood, network=made)
    with pytest.raises(OptionError, match=match):
        LinearGaussian().check(problem)
    if network:
        Laplace().check(problem)
