"""The fusion rules against their formulas, written out in numpy, and against exact Bayes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bflcore import Broadcast, Gaussian, Point
from bflcore.registry import load_registry

PRIOR = (0.2, 4.0)


def rule(name, **options):
    return load_registry().get("aggregator", name)(**options)


def clients(count, seed, size=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, size)), 10.0 ** rng.uniform(-3, 0.3, (count, size))


def gaussian(mean, variance):
    return Gaussian(torch.tensor(mean), torch.tensor(variance))


def expected(name, mu, s, w):
    w = (w / w.sum())[:, None]
    count = len(mu)
    if name == "weighted-sum":
        return (w * mu).sum(0), (w**2 * s).sum(0)
    if name == "linear-pool":
        mean = (w * mu).sum(0)
        return mean, (w * (s + (mu - mean) ** 2)).sum(0)
    if name in {"log-linear-pool", "weighted-conflation"}:
        total = (w / s).sum(0)
        top = w.max() if name == "weighted-conflation" else 1
        return (w * mu / s).sum(0) / total, top / total
    if name == "conflation":
        return (mu / s).sum(0) / (1 / s).sum(0), 1 / (1 / s).sum(0)
    precision = (1 / s).sum(0) - (count - 1) / PRIOR[1]
    return ((mu / s).sum(0) - (count - 1) * PRIOR[0] / PRIOR[1]) / precision, 1 / precision


RULES = (
    "weighted-sum",
    "linear-pool",
    "log-linear-pool",
    "conflation",
    "weighted-conflation",
    "weight-consolidation",
)


@pytest.mark.parametrize("name", RULES)
@given(count=st.integers(1, 12), seed=st.integers(0, 999))
def test_a_rule_is_its_formula_in_any_tree_of_partial_sums(name, count, seed):
    mu, s = clients(count, seed)
    w = np.random.default_rng(seed).uniform(0.1, 5, count)
    prior = gaussian(np.full(3, PRIOR[0]), np.full(3, PRIOR[1]))
    q, weights, fusion = gaussian(mu, s), torch.tensor(w), rule(name)
    cut = count // 2
    parts = [slice(0, cut), slice(cut, count)] if cut else [slice(0, count)]
    sums = [fusion.encode(q[part], weights[part], prior) for part in parts]
    total = fusion.merge(sums[-1], sums[0]) if cut else sums[0]
    mean, variance = expected(name, mu, s, w)
    for fused in (fusion.fuse(q, weights, prior), fusion.decode(total, prior)):
        np.testing.assert_allclose(fused.mean, mean, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(fused.variance, variance, rtol=1e-8)


@pytest.mark.parametrize("name", [r for r in RULES if r != "weight-consolidation"])
def test_where_a_client_is_certain_it_decides(name):
    q = gaussian([[1.0, 0.0], [3.0, 2.0]], [[0.0, 0.5], [0.5, 0.5]])
    prior = gaussian([0.0, 0.0], [1.0, 1.0])
    fused = rule(name).fuse(q, torch.tensor([1.0, 1.0], dtype=torch.float64), prior)
    assert bool(fused.mean.isfinite().all())
    assert bool(fused.variance.isfinite().all())
    if name in {"log-linear-pool", "conflation", "weighted-conflation"}:
        assert (float(fused.mean[0]), float(fused.variance[0])) == (1.0, 0.0)


@given(seed=st.integers(0, 99), parts=st.integers(1, 5))
def test_weight_consolidation_of_conjugate_clients_is_exact_bayes(seed, parts):
    """Linear regression on orthogonal inputs: one coordinate each, noise known, prior shared."""
    rng = np.random.default_rng(seed)
    noise, (m0, s0) = 0.3, PRIOR
    x, truth = rng.normal(size=(40, 3)), rng.normal(size=3)
    y = x * truth + np.sqrt(noise) * rng.normal(size=(40, 3))

    def posterior(rows):
        precision = 1 / s0 + (x[rows] ** 2).sum(0) / noise
        return (m0 / s0 + (x[rows] * y[rows]).sum(0) / noise) / precision, 1 / precision

    split = [posterior(rows) for rows in np.array_split(np.arange(40), parts)]
    q = gaussian(*(np.stack(field) for field in zip(*split, strict=True)))
    prior = gaussian(np.full(3, m0), np.full(3, s0))
    fused = rule("weight-consolidation").fuse(q, torch.ones(parts, dtype=torch.float64), prior)
    mean, variance = posterior(np.arange(40))
    np.testing.assert_allclose(fused.mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fused.variance, variance, rtol=1e-9)


@pytest.mark.parametrize(("name", "options"), [("median", {}), ("trimmed-mean", {"fraction": 0.2})])
def test_one_liar_does_not_move_robust_rules(name, options):
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(9, 4))
    mean[3] = 1e9
    fused = rule(name, **options).fuse(
        Point(torch.tensor(mean)), torch.ones(9), Point(torch.zeros(4, dtype=torch.float64))
    )
    assert float(fused.mean.abs().max()) < 3
    if name == "median":
        np.testing.assert_allclose(fused.mean, np.median(mean, 0))


@pytest.mark.parametrize("name", ["max-discrepancy", "distance"])
def test_weightings_trust_the_client_that_is_nearest(name):
    weighting = load_registry().get("weighting", name)()
    q = gaussian([[0.0], [0.1], [5.0]], [[1.0], [1.0], [1.0]])
    start = gaussian([0.0], [1.0])
    weights = weighting.weigh(q, torch.tensor([1, 1, 1]), Broadcast(0, start, start))
    assert weights.shape == (3,)
    assert bool((weights >= 0).all())
    assert int(weights.argmin()) == 2
    same = gaussian([[0.0]] * 3, [[1.0]] * 3)
    equal = weighting.weigh(same, torch.tensor([1, 1, 1]), Broadcast(0, start, start))
    assert len(set(equal.tolist())) == 1
