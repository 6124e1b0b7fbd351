"""Likelihoods against scipy's densities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from bflcore.errors import OptionError
from bflcore.problem.likelihoods import (
    Categorical,
    GaussianNoise,
    Predictive,
    default_likelihood,
)
from bflcore.testing.problems import generator, normal


def test_the_categorical_loss_is_minus_the_log_probability_of_the_label():
    outputs = 5 * normal(6, 4)
    targets = torch.randint(4, (6,), generator=generator())
    expected = -special.log_softmax(outputs.numpy(), axis=1)[np.arange(6), targets.numpy()]
    np.testing.assert_allclose(Categorical().nll(outputs, targets), expected, rtol=1e-12)


def test_the_categorical_loss_survives_certain_and_wrong_outputs():
    loss = Categorical().nll(torch.tensor([[1000.0, 0.0]]), torch.tensor([1]))
    assert loss.tolist() == [1000.0]


def test_the_categorical_prediction_is_a_softmax_for_every_draw():
    outputs = normal(2, 3, 5, 4)
    predictive = Categorical().predictive(outputs)
    np.testing.assert_allclose(predictive.draws, special.softmax(outputs.numpy(), axis=-1))
    assert predictive.noise is None


def test_the_gaussian_loss_is_minus_the_log_density_summed_over_targets():
    outputs, targets = normal(6, 3), normal(6, 3, seed=1)
    expected = -stats.norm(outputs.numpy(), np.sqrt(0.7)).logpdf(targets.numpy()).sum(1)
    loss = GaussianNoise(noise_variance=0.7).nll(outputs, targets)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gaussian_prediction_carries_its_noise_in_the_outputs_precision(dtype):
    outputs = normal(2, 3, 5, 1, dtype=dtype)
    predictive = GaussianNoise(noise_variance=0.25).predictive(outputs)
    assert predictive.draws is outputs
    assert predictive.noise.item() == 0.25
    assert predictive.noise.dtype == dtype


@pytest.mark.parametrize("variance", [0.0, -1.0, float("nan"), float("inf")])
def test_a_noise_variance_that_is_no_variance_is_refused_by_name(variance):
    with pytest.raises(OptionError, match="noise_variance"):
        GaussianNoise(noise_variance=variance)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_every_task_has_a_default_likelihood(task):
    assert default_likelihood(task).task == task


def test_a_closed_form_is_the_prediction_and_otherwise_the_mean_of_the_draws_is():
    draws, closed = normal(2, 3, 5, 4), normal(2, 5, 4, seed=1)
    torch.testing.assert_close(Predictive(draws).mean, draws.mean(1))
    assert Predictive(draws, closed_form=closed).mean is closed
