"""Gaussians with a precision matrix: against scipy, and against mean-field ones where those do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bflcore import DenseGaussian, Layout, OptionError
from bflcore.posteriors.dense import LARGEST, check_size
from bflcore.testing.problems import dense, gaussian, generator, normal


def correlated(*shape, seed=0, dtype=torch.float64):
    """Draw posteriors ``[*shape]`` whose parameters are correlated."""
    root = normal(*shape, shape[-1], seed=seed)
    precision = root @ root.mT + 0.5 * torch.eye(shape[-1])
    return DenseGaussian(normal(*shape, seed=seed + 1).to(dtype), precision.to(dtype))


def widened(posterior):
    """Return a mean-field Gaussian as a dense one."""
    return DenseGaussian(posterior.mean, torch.diag_embed(1 / posterior.variance))


def test_the_density_is_that_of_scipy():
    q, at = correlated(4), normal(6, 4, seed=8)
    expected = stats.multivariate_normal(q.mean, torch.linalg.inv(q.precision)).logpdf(at)
    torch.testing.assert_close(q.log_density(at), torch.as_tensor(expected))


def test_samples_have_the_covariance_of_the_posterior():
    q = correlated(3)
    draws = q.sample(normal(200_000, 3, seed=5))
    torch.testing.assert_close(draws.mean(0), q.mean, atol=0.01, rtol=0)
    torch.testing.assert_close(draws.T.cov(), torch.linalg.inv(q.precision), atol=0.02, rtol=0)


def test_the_draws_of_one_posterior_are_those_of_its_clients_one_by_one():
    q, noise = correlated(4), normal(2, 5, 4, seed=3)
    wide = DenseGaussian(q.mean.expand(5, 4), q.precision.expand(5, 4, 4))
    each = torch.stack([wide.sample(one) for one in noise])
    torch.testing.assert_close(q.sample(noise), each, rtol=1e-12, atol=1e-12)


def test_the_divergence_is_that_of_torch():
    q, p = correlated(3, 5), correlated(5, seed=7)
    made = [
        torch.distributions.MultivariateNormal(one.mean, precision_matrix=one.precision)
        for one in (q, p)
    ]
    torch.testing.assert_close(q.kl(p), torch.distributions.kl_divergence(*made))


def test_without_correlations_it_is_the_mean_field_gaussian():
    q, p = gaussian(3, 6), gaussian(6, seed=4)
    at, noise = normal(3, 6, seed=9), normal(3, 6, seed=10)
    torch.testing.assert_close(widened(q).kl(widened(p)), q.kl(p))
    torch.testing.assert_close(widened(q).log_density(at), q.log_density(at))
    torch.testing.assert_close(widened(q).sample(noise), q.sample(noise))
    torch.testing.assert_close(widened(q).marginals()["variance"], q.variance)
    torch.testing.assert_close(widened(q).variances()["conditional variance"], q.variance)
    matrix = normal(2, 6, seed=11)
    for found, expected in zip(
        widened(q)[0].combinations(matrix), q[0].combinations(matrix), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_combinations_have_the_variance_that_correlations_give():
    q, matrix = correlated(5), normal(3, 5, seed=6)
    mean, variance = q.combinations(matrix)
    torch.testing.assert_close(mean, matrix @ q.mean)
    torch.testing.assert_close(variance, (matrix @ q.covariance @ matrix.T).diagonal())


def test_multiplying_posteriors_is_bayes_rule_for_correlated_inputs():
    x, y = normal(30, 4) @ normal(4, 4, seed=1), normal(30, seed=2)
    flat = {"precision": torch.eye(4, dtype=torch.float64), "shift": torch.zeros(4).double()}
    parts = [{"precision": x[k::3].T @ x[k::3], "shift": x[k::3].T @ y[k::3]} for k in range(3)]
    total = {name: flat[name] + sum(part[name] for part in parts) for name in flat}
    q = DenseGaussian.from_natural(total)
    expected = np.linalg.solve(np.eye(4) + x.T.numpy() @ x.numpy(), x.T.numpy() @ y.numpy())
    torch.testing.assert_close(q.mean, torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


def test_an_improper_factor_is_no_valid_posterior():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    natural = {"precision": indefinite, "shift": torch.zeros(2)}
    assert DenseGaussian.from_natural(natural).invalid()
    given = DenseGaussian(torch.zeros(2), indefinite)
    assert given.invalid() == "precision is not positive definite"


def test_a_matrix_that_is_not_symmetric_is_invalid():
    skewed = DenseGaussian(torch.zeros(2), torch.tensor([[2.0, 0.5], [0.4, 2.0]]))
    assert skewed.invalid() == "precision is not symmetric"


def test_the_halves_are_the_nearest_product_of_two_densities():
    layout = Layout.of(dense(), "2", "body")
    q = correlated(layout.total)
    shared, personal = q.split(layout)
    nearest = shared.join(personal, layout)
    apart = float(nearest.kl(q))
    assert 0 < apart < math.inf
    for seed in range(20):
        moved = DenseGaussian(
            nearest.mean + 0.01 * normal(layout.total, seed=seed),
            nearest.precision * (1 + 0.01 * normal(1, seed=seed)),
        )
        assert float(moved.kl(q)) > apart


def test_in_float32_it_factorises_in_float64():
    # 1 / condition is far below the resolution of float32, which the entries still have.
    root = torch.tensor([[1.0, 0.0], [1.0, 1e-5]], dtype=torch.float64)
    ill = DenseGaussian(torch.zeros(2), (root @ root.T + 1e-7 * torch.eye(2)).float())
    assert ill.sample(torch.ones(2)).dtype == torch.float32
    assert bool(ill.sample(torch.ones(2)).isfinite().all())


def test_more_parameters_than_a_matrix_can_be_kept_of_are_refused():
    within = Layout(("w",), ((LARGEST,),), (True,))
    check_size(within)
    beyond = Layout(("w",), ((LARGEST + 1,),), (True,))
    with pytest.raises(OptionError, match="4,001 parameters .* allowed: up to 4,000; choose"):
        check_size(beyond)


def test_arbitrary_posteriors_differ_and_are_valid():
    layout = Layout.of(dense(), "2", "head")
    found = DenseGaussian.arbitrary(layout, 4, generator())
    assert not torch.equal(found[0].precision, found[1].precision)
    assert [found[k].invalid() for k in range(4)] == [None] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_natural_parameters_are_inverted(dtype):
    q = correlated(3, 6, dtype=dtype)
    again = DenseGaussian.from_natural(q.natural())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(again.pack(), q.pack(), rtol=tolerance, atol=tolerance)
