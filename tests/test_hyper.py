"""Hyperparameter updates: what the next round's prior is."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
from scipy import optimize

from bflcore import Broadcast, Continual, EmpiricalBayes, Fixed, Gaussian, Point
from bflcore.aggregation import add_sums
from bflcore.errors import OptionError
from bflcore.testing.problems import gaussian, normal, reply

WEIGHTS = torch.tensor([3.0, 1.0, 0.5, 7.0], dtype=torch.float64)


def server(dtype=torch.float64):
    """Return what the server sent in round 4, with some state of its own."""
    state = {"noise": torch.tensor(0.5)}
    return Broadcast(4, gaussian(6, seed=20, dtype=dtype), gaussian(6, seed=30, dtype=dtype), state)


def updated(part, posteriors, weights, fused, broadcast):
    total = part.summarise(reply(range(len(weights)), posteriors), weights, broadcast)
    return part.update(broadcast, fused, total)


each_part = pytest.mark.parametrize("part", [Fixed(), Continual(), EmpiricalBayes()])


@each_part
def test_the_next_round_starts_from_the_fused_posterior(part):
    broadcast, fused = server(), gaussian(6, seed=40)
    following = updated(part, gaussian(4, 6), WEIGHTS, fused, broadcast)
    assert following.start is fused
    assert following.round == 5
    assert dict(following.hyper) == dict(broadcast.hyper)


def test_a_fixed_prior_stays():
    broadcast = server()
    following = updated(Fixed(), gaussian(4, 6), WEIGHTS, gaussian(6, seed=40), broadcast)
    assert following.prior is broadcast.prior


@pytest.mark.parametrize("fused", [Point(normal(6)), gaussian(6)], ids=["point", "gaussian"])
def test_a_continual_prior_is_the_fused_posterior(fused):
    following = Continual().update(Broadcast(0, fused, fused), fused, {})
    for name, tensor in fused.pack().items():
        assert torch.equal(following.prior.pack()[name], tensor)


def test_only_certain_coordinates_of_a_continual_prior_are_given_a_variance():
    variance = torch.tensor([0.0, 2.0, 0.0, 1e-12])
    fused = Gaussian(torch.arange(4.0), variance)
    following = Continual(zero_variance=0.3).update(Broadcast(0, fused, fused), fused, {})
    torch.testing.assert_close(following.prior.variance, torch.tensor([0.3, 2.0, 0.3, 1e-12]))
    assert torch.equal(following.prior.mean, fused.mean)
    assert torch.equal(following.start.variance, torch.tensor([0.0, 2.0, 0.0, 1e-12]))


def test_zero_variances_may_be_left_to_the_inference():
    fused = Gaussian(torch.arange(2.0), torch.tensor([0.0, 2.0]))
    following = Continual(zero_variance=0).update(Broadcast(0, fused, fused), fused, {})
    assert torch.equal(following.prior.variance, fused.variance)


def test_a_prior_variance_that_cannot_be_is_refused():
    with pytest.raises(OptionError, match="zero_variance"):
        Continual(zero_variance=-1.0)
    with pytest.raises(OptionError, match="floor"):
        EmpiricalBayes(floor=0.0)


def test_the_empirical_prior_minimises_the_weighted_divergence_to_it():
    posteriors, broadcast = gaussian(4, 1), Broadcast(0, gaussian(1), gaussian(1, seed=30))
    prior = updated(EmpiricalBayes(), posteriors, WEIGHTS, gaussian(1), broadcast).prior
    mean, variance = posteriors.mean.numpy()[:, 0], posteriors.variance.numpy()[:, 0]

    def divergence(prior):
        """Sum w_k KL(q_k || N(m, e^t)), written out."""
        m, t = prior
        terms = 0.5 * (t - np.log(variance) + (variance + (mean - m) ** 2) / np.exp(t) - 1)
        return float(WEIGHTS.numpy() @ terms)

    best = optimize.minimize(divergence, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(prior.mean, best.x[:1], rtol=1e-5)
    np.testing.assert_allclose(prior.variance, np.exp(best.x[1:]), rtol=1e-5)


def test_the_empirical_prior_has_the_moments_of_the_mixture():
    posteriors = gaussian(4, 6)
    prior = updated(EmpiricalBayes(), posteriors, WEIGHTS, gaussian(6), server()).prior
    mean = np.average(posteriors.mean, axis=0, weights=WEIGHTS)
    second = np.average(posteriors.variance + posteriors.mean**2, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(prior.mean, mean)
    np.testing.assert_allclose(prior.variance, second - mean**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_empirical_prior_keeps_the_dtype(dtype):
    posteriors, fused = gaussian(4, 6, dtype=dtype), gaussian(6, dtype=dtype)
    prior = updated(EmpiricalBayes(), posteriors, WEIGHTS, fused, server(dtype)).prior
    assert (prior.mean.dtype, prior.variance.dtype) == (dtype, dtype)


def test_the_empirical_prior_of_equal_and_certain_clients_has_the_smallest_variance():
    certain = Gaussian(torch.ones(3, 6).double(), torch.zeros(3, 6).double())
    part = EmpiricalBayes(floor=1e-5)
    prior = updated(part, certain, WEIGHTS[:3], certain[0], server()).prior
    torch.testing.assert_close(prior.variance, torch.full((6,), 1e-5, dtype=torch.float64))
    torch.testing.assert_close(prior.mean, torch.ones(6, dtype=torch.float64))


def test_summaries_of_parts_of_the_round_add_up_to_the_whole():
    posteriors, broadcast, part = gaussian(4, 6), server(), EmpiricalBayes()
    whole = part.summarise(reply(range(4), posteriors), WEIGHTS, broadcast)
    left = part.summarise(reply([0, 1], posteriors[:2]), WEIGHTS[:2], broadcast)
    right = part.summarise(reply([2, 3], posteriors[2:]), WEIGHTS[2:], broadcast)
    for name, tensor in whole.items():
        torch.testing.assert_close(left[name] + right[name], tensor)


@each_part
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_that_clients_send_become_one_prior_that_has_the_moments_of_their_mixture(
    part, dtype
):
    posteriors, heads = gaussian(4, 6, dtype=dtype), gaussian(4, 3, seed=50, dtype=dtype)
    broadcast = server(dtype)
    result = reply(range(4), posteriors, statistics=heads.pack("personal."))
    each = [part.summarise(result.select([k]), WEIGHTS[k : k + 1], broadcast) for k in range(4)]
    total = reduce(add_sums, each)
    following = part.update(broadcast, gaussian(6, seed=40, dtype=dtype), total)
    alone = updated(part, posteriors, WEIGHTS, gaussian(6, seed=40, dtype=dtype), broadcast)
    common = Gaussian.unpack(following.hyper, "common.")
    mean = np.average(heads.mean.numpy(), axis=0, weights=WEIGHTS)  # eq. 34
    shift = np.square(heads.mean.numpy() - mean)
    variance = np.average(heads.variance.numpy() + shift, axis=0, weights=WEIGHTS)  # eq. 35
    np.testing.assert_allclose(common.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(common.variance, variance, rtol=1e-5)
    assert (common.mean.dtype, common.variance.dtype) == (dtype, dtype)
    assert following.hyper["noise"] is broadcast.hyper["noise"]
    torch.testing.assert_close(following.prior.mean, alone.prior.mean)
    torch.testing.assert_close(following.prior.variance, alone.prior.variance)


def test_summarising_leaves_the_clients_results_alone():
    posteriors, broadcast = gaussian(4, 6), server()
    before = posteriors.map(torch.clone)
    EmpiricalBayes().summarise(reply(range(4), posteriors), WEIGHTS, broadcast)
    assert torch.equal(posteriors.mean, before.mean)
    assert torch.equal(posteriors.variance, before.variance)
