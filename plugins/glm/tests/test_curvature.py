"""Expansions of a client's loss against autograd's, for the likelihoods of the core and others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bfl_glm import curvature
from bfl_glm.curvature import expand, loss
from bflcore import Categorical, GaussianNoise, Likelihood
from bflcore.testing.problems import normal, problem


class Cauchy(Likelihood):
    """A loss whose second derivative is negative in the tails."""

    name, task = "cauchy", "regression"

    def nll(self, outputs, targets):
        return (outputs - targets).square().log1p().sum(-1)

    def predictive(self, outputs):
        raise NotImplementedError


def case(likelihood, network=None):
    of = problem(network or nn.Linear(3, 2), sizes=(40,), head="", likelihood=likelihood)
    x, y = of.train.of(0)
    if likelihood.task == "regression":
        y = normal(40, 2, seed=6)
    return of, normal(of.layout.total, seed=5), x, y


def exact(of, x, y):
    def total(weights):
        return of.likelihood.nll(of.forward(weights[None], x[None])[0], y).sum()

    return total


@pytest.mark.parametrize("likelihood", [Categorical(), GaussianNoise()])
def test_of_a_linear_model_they_are_exact(likelihood):
    of, weights, x, y = case(likelihood)
    total = exact(of, x, y)
    found = expand(of, weights, x, y)
    assert found.loss == pytest.approx(float(total(weights)), rel=1e-12)
    assert loss(of, weights, x, y) == pytest.approx(found.loss, rel=1e-12)
    torch.testing.assert_close(found.gradient, torch.func.grad(total)(weights))
    hessian = torch.autograd.functional.hessian(total, weights)
    torch.testing.assert_close(found.curvature, hessian)


def test_of_a_network_the_gradient_is_exact_and_the_curvature_positive():
    of, weights, x, y = case(
        Categorical(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    )
    found = expand(of, weights, x, y)
    torch.testing.assert_close(found.gradient, torch.func.grad(exact(of, x, y))(weights))
    assert float(torch.linalg.eigvalsh(found.curvature).amin()) > -1e-10


def test_samples_are_added_up_a_few_at_a_time(monkeypatch):
    whole = expand(*case(Categorical()))
    monkeypatch.setattr(curvature, "NUMBERS", 50)
    parts = expand(*case(Categorical()))
    torch.testing.assert_close(parts.gradient, whole.gradient)
    torch.testing.assert_close(parts.curvature, whole.curvature)
    assert parts.loss == pytest.approx(whole.loss)


def test_negative_curvatures_count_as_zero():
    of, weights, x, y = case(Cauchy())
    far = expand(of, weights, x, y + 100)
    assert float(far.curvature.abs().max()) == 0
    assert float(torch.linalg.eigvalsh(expand(of, weights, x, y).curvature).amin()) > -1e-10


def test_no_samples_have_no_loss():
    of, weights, x, y = case(Categorical())
    found = expand(of, weights, x[:0], y[:0])
    assert found.loss == loss(of, weights, x[:0], y[:0]) == 0
    assert float(found.curvature.abs().max()) == float(found.gradient.abs().max()) == 0
