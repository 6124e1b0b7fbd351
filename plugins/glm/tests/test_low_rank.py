"""Sites of low rank in a common basis: against the pooled curvature, and the pooled posterior."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from bfl_glm import low_rank
from bfl_glm.curvature import expand as expand_densely
from bfl_glm.likelihoods import Bernoulli
from bfl_glm.low_rank import LowRankLaplace, common_basis, expand
from bfl_glm.sites import Laplace
from bflcore import GaussianNoise, OptionError
from bflcore.testing.problems import cohort, normal, surveyed

from .pooled import design, gaussian_posterior, logistic, newton
from .test_sites import NOISE, SIGMA, federated, posteriors

EXACT = {"prior_sigma": SIGMA, "damping": 1.0, "momentum": 0.0}


def small(likelihood=None):
    """Return a design of three clients, and the problem."""
    x, client = design(sizes=(30, 20, 9))
    y = x @ np.linspace(-1, 1, x.shape[1]) + np.sqrt(NOISE) * normal(len(x), seed=9).numpy()
    if likelihood:
        return x, (y > 0).astype(int), federated(x, (y > 0).astype(int), client, likelihood)
    return x, y, federated(x, y[:, None], client, GaussianNoise(noise_variance=NOISE))


def precision(q):
    return torch.diag(q.diagonal) + q.basis.mT @ q.core @ q.basis


def test_the_basis_spans_the_first_eigenvectors_of_the_scaled_pooled_curvature():
    x, _, problem = small()
    inference = LowRankLaplace(rank=2)
    q = inference.prior(surveyed(inference, problem))
    wide = np.hstack([x, np.ones((len(x), 1))])
    gram = wide.T @ wide / NOISE
    root = np.sqrt(np.diag(gram))
    vectors = np.linalg.eigh(gram / root / root[:, None])[1][:, -2:]
    found = q.basis.numpy() / root
    np.testing.assert_allclose(found @ found.T, np.eye(2), atol=1e-9)
    np.testing.assert_allclose(found.T @ found, vectors @ vectors.T, atol=1e-9)


def test_a_basis_has_no_more_directions_than_the_samples_give():
    half = normal(8, 3)
    curvature, probe = half @ half.T, normal(8, 7, seed=1)
    found = common_basis(curvature @ probe, curvature.diagonal(), probe, 5)
    assert found.shape == (5, 8)
    assert found.any(1).tolist() == [True] * 3 + [False] * 2


def test_the_parts_of_all_clients_add_up_to_that_of_the_pooled_curvature():
    _, _, problem = small(Bernoulli())
    inference = LowRankLaplace(rank=2)
    of = surveyed(inference, problem)
    basis, weights = inference.prior(of).basis, 0.3 * normal(of.layout.total, seed=2)
    dual = basis / of.survey["curvature"]
    parts = [expand(of, weights, *of.train.of(client), basis, dual) for client in of.clients]
    whole = [expand_densely(of, weights, *of.train.of(client)) for client in of.clients]
    pooled = sum(one.curvature for one in whole)
    left = torch.eye(len(weights)) - dual.mT @ basis
    torch.testing.assert_close(sum(one.core for one in parts), dual @ pooled @ dual.mT)
    rest = (left.mT @ pooled @ left).diagonal()
    torch.testing.assert_close(sum(one.diagonal for one in parts), rest)
    for part, exact in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.gradient, exact.gradient)
        torch.testing.assert_close(part.times(weights), exact.curvature @ weights)


def test_jacobians_that_are_not_kept_are_computed_again(monkeypatch):
    _, _, problem = small()
    basis, weights = normal(2, 7), normal(7, seed=2)
    x, y = problem.train.of(0)
    kept = expand(problem, weights, x, y, basis, basis).times(weights)
    monkeypatch.setattr(low_rank, "KEPT", 10)
    again = expand(problem, weights, x, y, basis, basis).times(weights)
    torch.testing.assert_close(again, kept)


def test_of_full_rank_it_is_the_pooled_posterior_after_one_round():
    x, y, problem = small()
    mean, covariance = gaussian_posterior(x, y, NOISE, SIGMA)
    inference = LowRankLaplace(rank=7, **EXACT)
    q, _ = next(posteriors(problem, inference, 1))
    np.testing.assert_allclose(q.mean, mean, atol=1e-9)
    np.testing.assert_allclose(torch.linalg.inv(precision(q)), covariance, atol=1e-9)


def test_of_low_rank_the_mean_is_the_pooled_one_in_the_end():
    x, y, problem = small()
    mean, covariance = gaussian_posterior(x, y, NOISE, SIGMA)
    *_, (q, _) = posteriors(problem, LowRankLaplace(rank=3, prior_sigma=SIGMA), 30)
    assert abs((q.mean.numpy() - mean) / np.sqrt(np.diag(covariance))).max() < 1e-3


def test_precisions_are_complete_once_each_client_has_replied_and_data_count_once():
    _, _, problem = small()
    inference = LowRankLaplace(rank=2, prior_sigma=SIGMA)
    due = None
    for q, seen in posteriors(problem, inference, 8, drop_out=0.4):
        if len(seen) == 3:
            due = precision(q) if due is None else due
            torch.testing.assert_close(precision(q), due, rtol=1e-12, atol=1e-9)
    assert due is not None
    x, _, _ = small()
    wide = np.hstack([x, np.ones((len(x), 1))])
    trace = (wide**2).sum() / NOISE + wide.shape[1] / SIGMA**2
    assert float(due.trace()) < 1.2 * trace


def test_the_mode_of_a_logistic_regression_is_the_pooled_one():
    x, y, problem = small(Bernoulli())
    mode, covariance = newton(x, y, SIGMA, logistic)
    *_, (q, _) = posteriors(problem, LowRankLaplace(rank=3, prior_sigma=SIGMA), 60)
    apart = (q.mean.numpy() - mode) / np.sqrt(np.diag(covariance))
    assert abs(apart).max() < 1e-5


def test_more_parameters_than_a_matrix_allows_are_fitted():
    x, client = normal(12, 4_500, seed=1).numpy(), np.arange(12) % 3
    problem = federated(x, np.arange(12) % 2, client, Bernoulli())
    inference = LowRankLaplace(rank=4)
    inference.check(problem)
    with pytest.raises(OptionError, match="4,501 parameters are too many"):
        Laplace().check(problem)
    q, _ = next(posteriors(problem, inference, 1))
    assert q.invalid() is None
    assert q.core.shape == (4, 4)


def test_personal_parameters_have_no_basis():
    _, _, problem = small()
    layout = type(problem.layout).of(problem.network, head="", sharing="none")
    of = attrs.evolve(problem, layout=layout)
    inference = LowRankLaplace(rank=2)
    known = surveyed(inference, of)
    assert not inference.prior(known).basis.any()
    assert cohort(known, inference).memory["personal.basis"].shape == (3, 2, 7)
