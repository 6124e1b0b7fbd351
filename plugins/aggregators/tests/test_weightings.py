"""Weights by divergence against scipy's and the formula's own sums."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bfl_aggregators.plugin import Distance, MaxDiscrepancy
from bflcore import Broadcast, Gaussian
from bflcore.testing.problems import gaussian

DOUBLE = torch.float64
EXAMPLES = torch.tensor([5, 1, 2, 9])
CLIENTS = gaussian(4, 3)
START = gaussian(3, seed=40)
SENT = Broadcast(0, START, gaussian(3, seed=50))


def kl(p, q):
    """Return KL(p || q) in nats by quadrature, one parameter after the other."""
    total = 0.0
    for mean, variance, other, spread in zip(p.mean, p.variance, q.mean, q.variance, strict=True):
        one = stats.norm(float(mean), float(variance) ** 0.5)
        two = stats.norm(float(other), float(spread) ** 0.5)
        grid = np.linspace(one.ppf(1e-15), one.isf(1e-15), 20_001)
        total += integrate.simpson(one.pdf(grid) * (one.logpdf(grid) - two.logpdf(grid)), x=grid)
    return total


def weigh(weighting, posteriors=CLIENTS, sent=SENT):
    return weighting.weigh(posteriors, torch.ones(len(posteriors.mean)), sent)


@pytest.mark.parametrize("over", ["sum", "max"])
@pytest.mark.parametrize("direction", ["to-others", "from-others"])
def test_discrepancy_weights_are_inverse_divergences_from_the_others(direction, over):
    apart = np.array(
        [[kl(CLIENTS[k], CLIENTS[j]) if j != k else 0 for j in range(4)] for k in range(4)]
    )
    apart = apart if direction == "to-others" else apart.T
    expected = 1 / (apart.sum(1) if over == "sum" else apart.max(1))
    found = weigh(MaxDiscrepancy(direction=direction, over=over, cap=0))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found.dtype == DOUBLE


def test_distance_weights_are_inverse_divergences_from_the_start():
    expected = [1 / kl(CLIENTS[k], START) for k in range(4)]
    np.testing.assert_allclose(weigh(Distance(cap=0)), expected, rtol=1e-9)


def test_a_distance_without_a_cap_is_known_client_by_client():
    together = weigh(Distance(cap=0))
    alone = [weigh(Distance(cap=0), CLIENTS[[k]]) for k in range(4)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("weighting", [MaxDiscrepancy, Distance])
def test_both_need_all_clients_for_the_cap(weighting):
    assert not weighting.local


@pytest.mark.parametrize("cap", [1.0, 4.0, 7.5])
def test_a_client_that_returns_the_start_has_at_most_the_cap_times_the_usual_weight(cap):
    lazy = Gaussian.concatenate([START.map(lambda t: t[None]), CLIENTS])
    weights = weigh(Distance(cap=cap), lazy)
    assert float(weights[0] / weights.median()) == pytest.approx(cap)
    assert float(weigh(Distance(cap=0), lazy)[0]) == 1e12  # alone it would decide


def test_one_client_cannot_have_most_of_the_weight_by_agreeing_with_the_others():
    near = CLIENTS.map(lambda t: torch.cat([t[:1] + 1e-9, t[:1], t[1:]]))
    weights = weigh(MaxDiscrepancy(), near)
    assert float(weights.max() / weights.median()) <= 4


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("weighting", [MaxDiscrepancy(), MaxDiscrepancy(over="max"), Distance()])
def test_identical_clients_weigh_the_same(weighting, dtype):
    same = START.map(lambda tensor: tensor.expand(4, -1).to(dtype))
    start = START.map(lambda tensor: tensor.to(dtype))
    weights = weigh(weighting, same, Broadcast(0, start, start))
    assert bool(weights.isfinite().all())
    assert len(set(weights.tolist())) == 1


@pytest.mark.parametrize("weighting", [MaxDiscrepancy(), Distance()])
def test_clients_that_are_infinitely_far_weigh_nothing_beside_others(weighting):
    clients = CLIENTS.map(torch.clone)
    clients.variance[2, 1] = 0.0
    weights = weigh(weighting, clients)
    assert bool(weights.isfinite().all())
    assert bool((weights > 0).all())
    if isinstance(weighting, Distance):
        assert float(weights[2] / weights[0]) < 1e-50
    else:  # everybody is infinitely far from somebody
        assert len(set(weights.tolist())) == 1


def test_a_single_client_has_a_weight():
    weights = weigh(MaxDiscrepancy(), CLIENTS[[1]])
    assert weights.shape == (1,)
    assert 0 < weights.item() < float("inf")


def test_small_divergences_of_float32_clients_are_told_apart():
    near = Gaussian(torch.tensor([[1.0 + 1e-5], [1.0 + 2e-5]]), torch.ones(2, 1))
    start = Gaussian(torch.tensor([1.0]), torch.ones(1))
    shifts = (near.mean.double() - 1)[:, 0]
    weights = weigh(Distance(), near, Broadcast(0, start, start))
    torch.testing.assert_close(weights, 2 / shifts.square(), rtol=1e-6, atol=0)
