"""Duals: ADMM walked by hand, and the pooled solution where it is known."""

import attrs
import pytest
import torch
from torch import nn

from bfl_admm import bayes
from bfl_admm.bayes import BayesianADMM
from bfl_admm.duals import DualUpdate
from bfl_admm.fedlap import FedLapInference
from bfl_admm.plugin import BayesADMM, FedLap
from bflcore import Average, Continual, Equal, Gaussian, IncompatibleError
from bflcore.engines.local import Local
from bflcore.problem.likelihoods import GaussianNoise
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import generator, separable

NOISE, SIZES, INPUTS = 0.5, (12, 8, 4), 3
DOUBLE = torch.float64


def regression(*, decoupled=False):
    """Return a linear regression of three clients, and its inputs and targets."""
    count = sum(SIZES)
    x = torch.randn(count, INPUTS, generator=generator(3), dtype=DOUBLE)
    if decoupled:  # each sample sees one parameter
        x = x[:, :1] * torch.eye(INPUTS, dtype=DOUBLE).repeat(count // INPUTS, 1)
    y = x.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator(4), dtype=DOUBLE)
    network = nn.Sequential(nn.Linear(INPUTS, 1, bias=False))
    likelihood = GaussianNoise(noise_variance=NOISE)
    return separable(SIZES, network=network, likelihood=likelihood, data=(x, y)), x, y


def rounds(recipe, of, count, cohorts=None):
    """Yield each broadcast of a run, the first one included, and the clients' memories."""
    broadcast = begin(recipe, of)
    with Local(workers=1).open(of, recipe.inference, 10) as session:
        yield broadcast, session.memories
        for number in range(count):
            clients = cohorts[number % len(cohorts)] if cohorts else of.clients
            broadcast = run_round(recipe, session, broadcast, clients).broadcast
            yield broadcast, session.memories


def pooled(x, y, precision=1.0):
    """Return natural parameters of the posterior of all data, and its mode."""
    hessian = x.T @ x / NOISE + precision * torch.eye(INPUTS, dtype=DOUBLE)
    return hessian, torch.linalg.solve(hessian, x.T @ y / NOISE)[:, 0]


@pytest.mark.parametrize("server_step", [None, 1.0])
def test_fedlap_is_admm_walked_by_hand(server_step):
    of, x, y = regression()
    delta, rho, lr, steps = 2.0, 0.3, 0.01, 4
    inference = FedLapInference(
        delta=delta, rho=rho, optimiser="sgd", lr=lr, local_epochs=steps, batch_size=100
    )
    recipe = Recipe(inference, Average(), Equal(), DualUpdate(server_step=server_step))
    *_, (found, _) = rounds(recipe, of, 3)
    w, duals, ends = of.initial.clone(), [torch.zeros(INPUTS).double()] * 3, (0, 12, 20, 24)
    share = server_step or 1 / (1 + 3 * rho)
    for _ in range(3):
        locals_ = []
        for k in range(3):
            inputs, targets = x[ends[k] : ends[k + 1]], y[ends[k] : ends[k + 1], 0]
            one = w.clone()
            for _ in range(steps):
                loss = inputs.T @ (inputs @ one - targets) / NOISE
                one = one - lr / len(inputs) * (loss + delta * duals[k] + delta * (one - w))
            locals_.append(one)
        duals = [dual + rho * (one - w) for dual, one in zip(duals, locals_, strict=True)]
        w = (1 - share) * sum(locals_) / 3 + share * sum(duals)
    torch.testing.assert_close(found.start.mean, w, rtol=1e-10, atol=1e-12)


def test_fedlap_converges_to_the_pooled_map_estimate():
    of, x, y = regression()
    delta = 20.0
    inference = FedLapInference(
        delta=delta, rho=0.3, optimiser="sgd", lr=0.1, local_epochs=100, batch_size=100
    )
    recipe = Recipe(inference, Average(), Equal(), DualUpdate())
    *_, (found, _) = rounds(recipe, of, 60)
    torch.testing.assert_close(found.start.mean, pooled(x, y, delta)[1], rtol=1e-4, atol=1e-4)


def exactly(inference, problem, cohort, start, prior, samples, trainable="all"):
    """Stand for IVON: the optimum over diagonal Gaussians of a linear regression."""
    fitted = []
    for row, size in enumerate(cohort.sizes):
        x, y = cohort.x[row, :size], cohort.y[row, :size]
        power = samples[row] / size
        hessian = power * x.T @ x / NOISE + torch.diag(prior["precision"][row])
        shift = power * (x.T @ y)[:, 0] / NOISE + prior["shift"][row]
        fitted.append((torch.linalg.solve(hessian, shift), 1 / hessian.diagonal()))
    mean, variance = (torch.stack(each) for each in zip(*fitted, strict=True))
    return Gaussian(mean, variance), mean.new_zeros(len(mean))


@pytest.mark.parametrize("rho", [0.5, 1.0])
@pytest.mark.parametrize("cohorts", [None, [(0, 1), (1, 2), (0, 2)]], ids=["all", "two of three"])
def test_with_exact_clients_bayesian_admm_converges_to_the_pooled_posterior(
    monkeypatch, rho, cohorts
):
    monkeypatch.setattr(bayes, "train", exactly)
    of, x, y = regression(decoupled=True)
    inference = BayesianADMM(prior_sigma=1.0, rho=rho)
    recipe = Recipe(inference, BayesADMM.aggregator, BayesADMM.weighting, DualUpdate())
    *_, (found, memories) = rounds(recipe, of, 80, cohorts)
    hessian, mode = pooled(x, y)
    torch.testing.assert_close(1 / found.start.variance, hessian.diagonal(), rtol=1e-8, atol=0)
    torch.testing.assert_close(found.start.mean, mode, rtol=1e-8, atol=1e-8)
    # The duals are then the clients' own likelihoods, and the server knows their sum.
    ends = (0, 12, 20, 24)
    for client, memory in memories.items():
        own = x[ends[client] : ends[client + 1]].square().sum(0) / NOISE
        torch.testing.assert_close(memory["site.precision"], own, rtol=1e-7, atol=1e-9)
    total = sum(memory["site.precision"] for memory in memories.values())
    torch.testing.assert_close(found.hyper["dual.precision"], total, rtol=1e-9, atol=1e-12)


def test_on_correlated_inputs_the_mean_is_the_pooled_one(monkeypatch):
    monkeypatch.setattr(bayes, "train", exactly)
    of, x, y = regression()
    recipe = Recipe(
        BayesianADMM(prior_sigma=1.0), BayesADMM.aggregator, BayesADMM.weighting, DualUpdate()
    )
    *_, (found, _) = rounds(recipe, of, 200)
    hessian, mode = pooled(x, y)
    torch.testing.assert_close(found.start.mean, mode, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(1 / found.start.variance, hessian.diagonal(), rtol=1e-6, atol=0)


def test_with_ivon_the_posterior_is_near_the_pooled_one():
    of, x, y = regression(decoupled=True)
    inference = BayesADMM.inference.replace(
        local_epochs=300, batch_size=100, lr=0.02, initial_sigma=0.2
    )
    recipe = Recipe(inference, BayesADMM.aggregator, BayesADMM.weighting, BayesADMM.hyper)
    *_, (found, _) = rounds(recipe, of, 15)
    hessian, mode = pooled(x, y)
    off = (found.start.mean - mode) * hessian.diagonal().sqrt()
    assert float(off.abs().max()) < 0.5
    assert float((1 / found.start.variance / hessian.diagonal()).log().abs().max()) < 0.5


@pytest.mark.parametrize("inference", [BayesianADMM(), FedLapInference()])
def test_another_prior_update_is_refused(inference):
    parts = {"hyper": Continual(), "aggregator": Average(), "weighting": Equal()}
    with pytest.raises(IncompatibleError, match="choose --hyper dual-update"):
        inference.check_parts(parts)
    inference.check_parts({**parts, "hyper": DualUpdate()})


def test_a_round_without_duals_passes_the_fused_posterior_on():
    of, *_ = regression()
    broadcast = begin(Recipe(FedLapInference(), Average(), Equal(), DualUpdate()), of)
    fused = attrs.evolve(broadcast.start, mean=broadcast.start.mean + 1)
    following = DualUpdate().update(broadcast, fused, {})
    assert following.round == 1
    assert following.start is fused


def test_fedlap_takes_the_sum_of_the_duals():
    assert FedLap.hyper.server_step == 1
