"""The likelihoods of generalised linear models against scipy's densities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from bfl_glm.likelihoods import Bernoulli, Poisson, StudentT
from bflcore.errors import OptionError
from bflcore.problem.likelihoods import Predictive
from bflcore.testing.problems import generator, normal


def counts(*shape):
    return torch.randint(7, shape, generator=generator()).double()


def test_the_bernoulli_loss_is_minus_the_log_probability_of_the_class():
    z, y = 4 * normal(9, 1), torch.randint(2, (9,), generator=generator())
    expected = -stats.bernoulli(special.expit(z[:, 0].numpy())).logpmf(y.numpy())
    np.testing.assert_allclose(Bernoulli().nll(z, y), expected, rtol=1e-12)


def test_the_bernoulli_loss_survives_certain_and_wrong_outputs():
    loss = Bernoulli().nll(torch.tensor([[1000.0], [-1000.0]]), torch.tensor([0, 1]))
    assert loss.tolist() == [1000.0, 1000.0]


def test_the_bernoulli_prediction_has_both_classes():
    z = normal(2, 3, 5, 1)
    found = Bernoulli().predictive(z)
    np.testing.assert_allclose(found.draws[..., 1], special.expit(z[..., 0].numpy()), rtol=1e-12)
    np.testing.assert_allclose(found.draws.sum(-1), 1, rtol=1e-12)
    assert found.noise is None


def test_bernoulli_needs_one_output_and_two_classes():
    assert Bernoulli().outputs(2) == 1
    with pytest.raises(OptionError, match="2 classes, but the targets have 3"):
        Bernoulli().outputs(3)


def test_the_poisson_loss_is_minus_the_log_probability_summed_over_targets():
    outputs, y = normal(6, 2), counts(6, 2)
    expected = -stats.poisson(np.exp(outputs.numpy())).logpmf(y.numpy()).sum(1)
    np.testing.assert_allclose(Poisson().nll(outputs, y), expected, rtol=1e-12)


def test_the_poisson_prediction_has_the_variance_of_the_mixture():
    outputs = normal(1, 4, 5, 1)
    found = Poisson().predictive(outputs)
    rates = np.exp(outputs[0].numpy())
    # The law of total variance: E[rate] + Var[rate].
    drawn = found.draws[0].var(0, correction=0) + found.noise[0]
    np.testing.assert_allclose(drawn, rates.mean(0) + rates.var(0), rtol=1e-12)


def test_the_poisson_density_is_that_of_the_mixture_over_the_draws():
    outputs, y = normal(1, 4, 5, 1), counts(5, 1)
    expected = np.log(stats.poisson(np.exp(outputs[0].numpy())).pmf(y.numpy()).mean(0))
    found = Poisson().log_density(Poisson().predictive(outputs), y)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_poisson_rate_of_zero_is_not_impossible_but_very_unlikely():
    found = Poisson().log_density(Predictive(torch.zeros(1, 1, 2, 1)), torch.tensor([[0.0], [3.0]]))
    assert found[0, 0] == pytest.approx(0, abs=1e-30)
    assert found[1, 0] < -100
    assert bool(found.isfinite().all())


@pytest.mark.parametrize(("value", "shown"), [(-1.0, "-1"), (0.5, "0.5")])
def test_a_target_that_is_not_a_count_is_named(value, shown):
    with pytest.raises(OptionError, match=f"poisson is for counts, but a target is {shown};"):
        Poisson().check_targets(torch.tensor([[1.0], [value]]))


def test_the_student_t_loss_is_minus_the_log_density():
    outputs, y = normal(6, 2), normal(6, 2, seed=1)
    noise = StudentT(degrees=3.0, scale=0.4)
    expected = -stats.t(3, loc=outputs.numpy(), scale=0.4).logpdf(y.numpy()).sum(1)
    np.testing.assert_allclose(noise.nll(outputs, y), expected, rtol=1e-12)


def test_the_student_t_prediction_has_the_variance_and_the_density_of_the_noise():
    outputs, y = normal(1, 4, 5, 1), normal(5, 1, seed=1)
    noise = StudentT(degrees=5.0, scale=0.4)
    found = noise.predictive(outputs)
    assert found.noise.item() == pytest.approx(stats.t(5, scale=0.4).var())
    density = stats.t(5, loc=outputs[0].numpy(), scale=0.4).pdf(y.numpy()).mean(0)
    np.testing.assert_allclose(noise.log_density(found, y), np.log(density), rtol=1e-12)


def test_too_few_degrees_of_freedom_for_a_variance_are_refused():
    with pytest.raises(OptionError, match="degrees"):
        StudentT(degrees=2.0)
