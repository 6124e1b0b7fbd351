"""The robust rules against independent computations, and what lies cost them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

from bfl_aggregators.plugin import GeometricMedian, TrimmedPrecisionWeightedMean
from bflcore import Gaussian, Point

CLIENTS, SIZE = 7, 4


def drawn(seed=0, clients=CLIENTS):
    noise = torch.Generator().manual_seed(seed)
    mean = torch.randn(clients, SIZE, generator=noise, dtype=torch.float64)
    return Gaussian(mean, torch.rand(clients, SIZE, generator=noise, dtype=torch.float64) + 0.1)


def fused(rule, posteriors):
    return rule.fuse(posteriors, torch.ones(len(posteriors.mean)).double(), posteriors[0])


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_minimises_the_sum_of_wasserstein_distances(seed):
    posteriors = drawn(seed)
    points = torch.cat([posteriors.mean, posteriors.variance.sqrt()], 1).numpy()
    best = optimize.minimize(
        lambda x: np.linalg.norm(points - x, axis=1).sum(), points.mean(0), method="BFGS", tol=1e-10
    )
    found = fused(GeometricMedian(), posteriors)
    expected = torch.from_numpy(best.x)
    torch.testing.assert_close(found.mean, expected[:SIZE], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.variance.sqrt(), expected[SIZE:], atol=1e-5, rtol=0)


def test_on_a_line_the_geometric_median_is_the_median():
    points = Point(torch.tensor([[0.0], [1.0], [5.0], [6.0], [100.0]]).double())
    assert float(fused(GeometricMedian(), points).mean) == pytest.approx(5.0, abs=1e-4)


def test_a_distant_liar_hardly_moves_the_geometric_median():
    posteriors = drawn(clients=10)
    posteriors.mean[0] = 1e9
    found = fused(GeometricMedian(), posteriors).mean
    others = posteriors.mean[1:]
    assert bool((found > others.amin(0)).all() and (found < others.amax(0)).all())


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.45])
def test_the_trimmed_precision_weighted_mean_is_that_of_a_loop(fraction):
    posteriors = drawn(3, clients=10)
    cut = int(fraction * 10 + 1e-9)
    found = fused(TrimmedPrecisionWeightedMean(fraction=fraction), posteriors)
    for p in range(SIZE):
        mean, variance = posteriors.mean[:, p].tolist(), posteriors.variance[:, p].tolist()
        precisions, ranked = sorted(1 / s for s in variance), sorted(mean)
        h = [min(max(1 / s, precisions[cut]), precisions[9 - cut]) for s in variance]
        mu = [min(max(m, ranked[cut]), ranked[9 - cut]) for m in mean]
        expected = sum(a * b for a, b in zip(h, mu, strict=True)) / sum(h)
        assert float(found.mean[p]) == pytest.approx(expected)
        assert float(found.variance[p]) == pytest.approx(10 / sum(h))


def test_without_trimming_it_is_the_product_with_pooled_precision():
    posteriors = drawn(5)
    precision = posteriors.variance.reciprocal()
    found = fused(TrimmedPrecisionWeightedMean(fraction=0.0), posteriors)
    product = (precision * posteriors.mean).sum(0) / precision.sum(0)
    torch.testing.assert_close(found.mean, product)
    torch.testing.assert_close(found.variance, precision.mean(0).reciprocal())


def test_claiming_certainty_gains_a_liar_nothing():
    posteriors = drawn(6, clients=10)
    before = fused(TrimmedPrecisionWeightedMean(), posteriors)
    posteriors.variance[0] = 1e-30
    found = fused(TrimmedPrecisionWeightedMean(), posteriors)
    assert float((found.mean - before.mean).abs().max()) < 0.3
    assert bool((found.variance > 0.05).all())
