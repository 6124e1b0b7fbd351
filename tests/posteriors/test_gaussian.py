"""Mean-field Gaussians: sampling and divergences against scipy and quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats
from torch.distributions import Normal, kl_divergence

from bflcore import Gaussian
from bflcore.testing.problems import gaussian, normal


def test_a_negative_variance_is_a_fault_and_a_zero_one_is_not():
    mean = torch.zeros(2)
    assert Gaussian(mean, torch.tensor([1.0, -1e-9])).invalid() == "variance is negative"
    assert Gaussian(mean, torch.tensor([1.0, 0.0])).invalid() is None


def test_a_sample_has_the_quantile_of_its_noise():
    posterior, noise = gaussian(5), normal(4, 5, seed=9)
    expected = stats.norm.ppf(
        stats.norm.cdf(noise), loc=posterior.mean, scale=posterior.variance.sqrt()
    )
    torch.testing.assert_close(posterior.sample(noise), torch.as_tensor(expected))


def test_the_divergence_of_gaussians_is_the_integral_it_stands_for():
    q, p = (
        Gaussian(torch.tensor([0.4]), torch.tensor([0.3])),
        Gaussian(torch.tensor([-1.0]), torch.tensor([2.0])),
    )
    one, other = stats.norm(0.4, math.sqrt(0.3)), stats.norm(-1.0, math.sqrt(2.0))
    integral, _ = integrate.quad(
        lambda w: one.pdf(w) * (one.logpdf(w) - other.logpdf(w)), -6.0, 7.0
    )
    assert float(q.kl(p)) == pytest.approx(integral, rel=1e-5)


def test_the_divergence_sums_over_parameters_and_keeps_the_clients():
    q, p = gaussian(3, 6), gaussian(6, seed=5)
    expected = kl_divergence(
        Normal(q.mean, q.variance.sqrt()), Normal(p.mean, p.variance.sqrt())
    ).sum(-1)
    torch.testing.assert_close(q.kl(p), expected)


def test_a_gaussian_does_not_diverge_from_itself_even_where_it_is_certain():
    q = Gaussian(normal(4), torch.tensor([0.0, 1.0, 1e-30, 2.0], dtype=torch.float64))
    assert float(q.kl(q)) == 0.0


def test_certainty_diverges_infinitely_from_doubt():
    certain = Gaussian(torch.zeros(1), torch.zeros(1))
    doubtful = Gaussian(torch.zeros(1), torch.ones(1))
    assert float(certain.kl(doubtful)) == math.inf
    assert float(doubtful.kl(certain)) == math.inf
    assert float(certain.kl(Gaussian(torch.ones(1), torch.zeros(1)))) == math.inf


def test_natural_parameters_are_inverted():
    q = Gaussian(torch.randn(3, 5).double(), torch.rand(3, 5).double() + 0.1)
    again = Gaussian.from_natural(q.natural())
    torch.testing.assert_close(again.pack(), q.pack(), rtol=1e-12, atol=1e-12)


def test_adding_natural_parameters_multiplies_densities():
    one, two = (Gaussian(torch.randn(4).double(), torch.rand(4).double() + 0.1) for _ in range(2))
    theirs = two.natural()
    product = Gaussian.from_natural({n: t + theirs[n] for n, t in one.natural().items()})
    at = torch.randn(7, 4).double()
    constant = product.log_density(at) - one.log_density(at) - two.log_density(at)
    torch.testing.assert_close(constant, constant[:1].expand(7))
