"""The estimated noise against numpy's least squares on the pooled samples."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from bfl_glm.noise import PRODUCTS, products, with_estimated_noise
from bfl_glm.sites import Laplace
from bflcore import Categorical, GaussianNoise, OptionError
from bflcore.testing.problems import normal

from .test_sites import federated


def example(targets=1, samples=40, columns=3):
    x = normal(samples, columns)
    y = x @ normal(columns, targets, seed=1) + 0.7 + 0.4 * normal(samples, targets, seed=2)
    client = np.arange(samples) % 4
    return x, y, federated(x, y.numpy(), client, GaussianNoise(), outputs=targets)


def surveyed(problem):
    each = [problem.cohort([client], {}, 0) for client in problem.clients]
    total = sum(products(cohort)[0] for cohort in each)
    return attrs.evolve(problem, survey={PRODUCTS: total})


@pytest.mark.parametrize("targets", [1, 2])
def test_the_estimate_is_the_unbiased_one_of_the_pooled_fit(targets):
    x, y, problem = example(targets)
    design = np.column_stack([x.numpy(), np.ones(len(x))])
    residuals = np.linalg.lstsq(design, y.numpy(), rcond=None)[1]
    expected = residuals.sum() / (targets * (40 - 4))
    found = with_estimated_noise(surveyed(problem)).likelihood.noise_variance
    assert found == pytest.approx(expected, rel=1e-10)


def test_a_collinear_column_changes_nothing_but_the_count():
    x, y, _ = example()
    twice = torch.cat([x, x[:, :1]], 1)
    problem = federated(twice, y.numpy(), np.arange(40) % 4, GaussianNoise())
    design = np.column_stack([x.numpy(), np.ones(len(x))])
    residuals = np.linalg.lstsq(design, y.numpy(), rcond=None)[1]
    found = with_estimated_noise(surveyed(problem)).likelihood.noise_variance
    assert found == pytest.approx(float(residuals[0]) / (40 - 5), rel=1e-8)


def test_nothing_is_estimated_without_enough_samples_or_before_the_survey():
    _, _, few = example(samples=4)
    assert with_estimated_noise(surveyed(few)).likelihood == GaussianNoise()
    _, _, problem = example()
    assert with_estimated_noise(problem) is problem


def test_the_survey_has_products_only_where_noise_is_estimated():
    _, _, problem = example()
    cohort = problem.cohort([0], {}, 0)
    assert PRODUCTS in Laplace(noise="estimated").survey(problem, cohort)
    assert PRODUCTS not in Laplace().survey(problem, cohort)
    classes = attrs.evolve(problem, likelihood=Categorical())
    assert PRODUCTS not in Laplace(noise="estimated").survey(classes, cohort)


def test_a_model_that_is_not_linear_is_refused():
    x, y, _ = example()
    network = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    problem = federated(x, y.numpy(), np.arange(40) % 4, GaussianNoise(), network=network)
    with pytest.raises(OptionError, match=r"inference\.noise: estimated is for models"):
        Laplace(noise="estimated").check(problem)
