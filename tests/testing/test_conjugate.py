"""The regression with a known posterior, and the clients that solve it."""

from __future__ import annotations

import pytest
import torch

from bflcore.testing.conjugate import NOISE, ExactSites, pooled, regression
from bflcore.testing.problems import cohort, first_broadcast, normal


def test_the_pooled_posterior_is_that_of_ridge_regression():
    of, inference = regression(sizes=(20, 10), inputs=4), ExactSites(prior_mean=0.0)
    mean, full = pooled(of, inference.initial(of))
    # The same minimum as least squares with a row per parameter for the prior.
    rows = torch.cat([of.train.x / NOISE**0.5, torch.eye(4, dtype=torch.float64) / 2**0.5])
    targets = torch.cat([of.train.y / NOISE**0.5, torch.zeros(4, 1, dtype=torch.float64)])
    torch.testing.assert_close(mean[:, None], torch.linalg.lstsq(rows, targets).solution)
    torch.testing.assert_close(full, rows.T @ rows)


@pytest.mark.parametrize("condition", [5.0, 50.0])
def test_the_features_have_the_condition_number_that_was_asked_for(condition):
    x = regression(sizes=(50_000,), inputs=4, condition=condition).train.x
    found = float(torch.linalg.cond(x.T @ x))
    assert found == pytest.approx(condition, rel=0.05)


def test_a_client_minimises_the_divergence_from_cavity_times_likelihood():
    of, inference = regression(sizes=(9,), inputs=3, condition=5.0), ExactSites()
    sent = first_broadcast(inference, of)
    cavity = sent.prior.map(lambda tensor: tensor[None])
    found, _ = inference.tilt(of, sent, cohort(of, inference), cavity)

    def bound(mean, variance):
        """-ELBO in nats, up to a constant."""
        prior, x, y = sent.prior, of.train.x, of.train.y
        expected = ((y.flatten() - x @ mean).square() + x.square() @ variance).sum() / (2 * NOISE)
        ratio = variance / prior.variance
        apart = (mean - prior.mean).square() / prior.variance
        return expected + 0.5 * (ratio - ratio.log() + apart).sum()

    least = bound(found.mean[0], found.variance[0])
    for seed in range(20):
        step = 0.01 * normal(2, 3, seed=seed)
        assert bound(found.mean[0] + step[0], found.variance[0] * step[1].exp()) > least
