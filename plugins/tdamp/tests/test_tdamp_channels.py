import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bfl_tdamp import channels

PAIRS = [(p, v) for p in (-6.0, -1.5, -0.1, 0.0, 0.7, 4.0) for v in (0.01, 3.0)]
SCALES = [(0.0, 0.0), (0.4, 0.3), (-1.0, 2.0), (3.0, 0.1), (-2.0, 5.0), (6.0, 4.0)]


def double(*values):
    return [torch.tensor([[[value]]], dtype=torch.float64) for value in values]


def tilted(p, v, factor):
    """Return mean and variance of N(p, v) times exp(factor), by quadrature around its peak."""
    grid = np.linspace(p - 14 * v**0.5 - 8, p + 14 * v**0.5 + 8, 401)
    peak = max(factor(z) - (z - p) ** 2 / (2 * v) for z in grid)

    def moment(power, centre):
        def integrand(z):
            return (z - centre) ** power * math.exp(factor(z) - (z - p) ** 2 / (2 * v) - peak)

        return sum(
            integrate.quad(integrand, *side, epsabs=0, epsrel=1e-12, limit=400)[0]
            for side in ((grid[0], 0), (0, grid[-1]))
        )

    mass = moment(0, 0.0)
    mean = moment(1, 0.0) / mass
    return mean, moment(2, mean) / mass


@pytest.mark.parametrize(("p", "v"), PAIRS)
def test_rectified_moments_are_those_of_quadrature(p, v):
    found = channels.relu_forward(*double(p, v))
    low, high = max(0.0, p - 20 * v**0.5), max(1.0, p + 20 * v**0.5)

    def moment(power):
        return integrate.quad(
            lambda z: z**power * stats.norm.pdf(z, p, v**0.5), low, high, epsabs=1e-14, limit=300
        )[0]

    mean = moment(1)
    assert float(found.mean) == pytest.approx(mean, abs=1e-8)
    assert float(found.variance) == pytest.approx(moment(2) - mean**2, abs=1e-8)


@pytest.mark.parametrize(("p", "v"), PAIRS)
@pytest.mark.parametrize(("field", "precision"), SCALES)
def test_the_way_back_through_a_rectifier_is_that_of_quadrature(p, v, field, precision):
    forward = channels.relu_forward(*double(p, v))
    s, u = channels.relu_backward(forward, *double(field, precision))
    mean, variance = tilted(p, v, lambda z: field * max(0.0, z) - precision * max(0.0, z) ** 2 / 2)
    assert float(s) * v == pytest.approx(mean - p, abs=1e-8)
    assert float(u) * v == pytest.approx(max(0.0, 1 - variance / v), abs=1e-8)


@pytest.mark.parametrize("alpha", [-60.0, -31.0, -29.0, -9.0, -7.9, -1.0, 0.0, 5.0])
def test_truncated_moments_hold_far_into_the_tail(alpha):
    found = channels.normal(torch.tensor([alpha], dtype=torch.float64))

    def moment(power):  # of t + alpha given t > -alpha, scaled so that nothing underflows
        return integrate.quad(
            lambda e: e**power * math.exp(-(e**2) / 2 + alpha * e), 0, 40, epsabs=0, epsrel=1e-12,
            limit=400, points=[1 / max(1.0, -alpha)],
        )[0]  # fmt: skip

    excess = moment(1) / moment(0)
    assert float(found.excess) == pytest.approx(excess, rel=1e-8)
    assert float(found.variance) == pytest.approx(moment(2) / moment(0) - excess**2, abs=1e-8)
    assert float(found.log_cdf) == pytest.approx(stats.norm.logcdf(alpha), rel=1e-10)
    alone = channels.log_cdf(torch.tensor([alpha], dtype=torch.float64))
    assert float(alone) == pytest.approx(stats.norm.logcdf(alpha), rel=1e-10)


def test_float32_stays_finite_and_close_to_float64():
    alpha = torch.linspace(-60, 60, 2401)
    v = torch.tensor(0.3)
    exact = channels.relu_forward((alpha * v.sqrt()).double(), v.double().expand(2401))
    found = channels.relu_forward(alpha * v.sqrt(), v.expand(2401))
    for name in ("mean", "variance"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(exact, name), rtol=2e-3, atol=1e-6
        )
    for field in (-50.0, 0.0, 50.0):
        for precision in (0.0, 1.0, 1e4):
            back = channels.relu_backward(found, torch.tensor(field), torch.tensor(precision))
            reference = channels.relu_backward(
                exact, torch.tensor(field).double(), torch.tensor(precision).double()
            )
            assert bool(back.s.isfinite().all())
            assert bool(back.u.isfinite().all())
            torch.testing.assert_close(back.s.double(), reference.s, rtol=2e-3, atol=2e-3)


def test_a_gaussian_target_gives_bayes_rule():
    p, v, y, noise = double(0.4, 1.5, 2.0, 0.5)
    found = channels.gaussian_output(p, v, y, noise)
    precision = 1 / 1.5 + 1 / 0.5
    mean = (0.4 / 1.5 + 2.0 / 0.5) / precision
    assert float(p + v * found.s) == pytest.approx(mean)
    assert float(v * (1 - v * found.u)) == pytest.approx(1 / precision)
    assert float(found.nll) == pytest.approx(-stats.norm.logpdf(2.0, 0.4, 2.0**0.5))
    assert float(found.residuals["residual"]) == pytest.approx((2.0 - mean) ** 2 + 1 / precision)


@pytest.mark.parametrize("label", [0, 1])
def test_two_classes_are_exact(label):
    p = torch.tensor([[[0.3, -0.8]]], dtype=torch.float64)
    v = torch.tensor([[[0.7, 1.9]]], dtype=torch.float64)
    noise = 0.4
    found = channels.probit_output(p, v, torch.tensor([[label]]), torch.tensor(noise).double())
    for c in (0, 1):
        other = 1 - c
        sign = 1 if c == label else -1
        width = (noise + float(v[0, 0, other])) ** 0.5
        mean, variance = tilted(
            float(p[0, 0, c]),
            float(v[0, 0, c]),
            lambda z, s=sign, w=width, o=other: stats.norm.logcdf(s * (z - float(p[0, 0, o])) / w),
        )
        gap = float(v[0, 0, c])
        assert float(found.s[0, 0, c]) * gap == pytest.approx(mean - float(p[0, 0, c]), abs=1e-8)
        assert 1 - float(found.u[0, 0, c]) * gap == pytest.approx(variance / gap, abs=1e-8)


def test_three_classes_are_close_to_sampling():
    p = torch.tensor([[[0.5, 0.1, -0.4]]], dtype=torch.float64)
    v = torch.tensor([[[0.6, 1.0, 0.4]]], dtype=torch.float64)
    found = channels.probit_output(p, v, torch.tensor([[1]]), torch.tensor(0.8).double())
    noise = torch.Generator().manual_seed(0)
    z = p[0] + v[0].sqrt() * torch.randn(2_000_000, 3, generator=noise, dtype=torch.float64)
    gaps = (z[:, 1:2] - z[:, [0, 2]]) / 0.8**0.5
    weight = torch.special.ndtr(gaps).prod(1)
    mean = (weight[:, None] * z).sum(0) / weight.sum()
    variance = (weight[:, None] * (z - mean).square()).sum(0) / weight.sum()
    # The rivals are taken as independent given z_y, which leaves a few per cent.
    torch.testing.assert_close((p + v * found.s)[0, 0], mean, atol=0.02, rtol=0)
    torch.testing.assert_close((v * (1 - v * found.u))[0, 0], variance, atol=0.05, rtol=0)


def test_class_probabilities_are_those_of_sampling():
    p = torch.tensor([0.5, 0.1, -0.4], dtype=torch.float64)
    v = torch.tensor([0.6, 1.0, 0.4], dtype=torch.float64)
    found = channels.probit_probabilities(p, v, torch.tensor(0.8).double())
    noise = torch.Generator().manual_seed(1)
    z = p + v.sqrt() * torch.randn(1_000_000, 3, generator=noise, dtype=torch.float64)
    gaps = torch.special.ndtr((z[:, :, None] - z[:, None, :]) / 0.8**0.5)
    score = (gaps.prod(2) / 0.5).mean(0)  # the diagonal is Phi(0)
    torch.testing.assert_close(found, score / score.sum(), atol=2e-3, rtol=0)


def test_probabilities_of_two_classes_are_a_probit():
    p = torch.tensor([0.5, -0.3], dtype=torch.float64)
    v = torch.tensor([0.6, 1.0], dtype=torch.float64)
    found = channels.probit_probabilities(p, v, torch.tensor(0.8).double())
    assert float(found[0]) == pytest.approx(stats.norm.cdf(0.8 / (0.8 + 1.6) ** 0.5), abs=1e-8)


def logits(count, classes, seed=0):
    noise = torch.Generator().manual_seed(seed)
    p = 3 * torch.randn(1, count, classes, generator=noise, dtype=torch.float64)
    return p, torch.rand(1, count, classes, generator=noise, dtype=torch.float64)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_probabilities_behind_the_loss_sum_to_one_over_the_labels(classes):
    p, v = logits(5, classes)
    noise = torch.tensor([[[0.7]]], dtype=torch.float64)
    total = sum(
        (-channels.probit_output(p, v, torch.full((1, 5), label), noise).nll).exp()
        for label in range(classes)
    )
    torch.testing.assert_close(total, torch.ones(1, 5, dtype=torch.float64))


def test_the_loss_of_two_classes_is_a_probit():
    p, v = logits(5, 2)
    noise = torch.tensor([[[0.7]]], dtype=torch.float64)
    found = channels.probit_output(p, v, torch.zeros(1, 5, dtype=torch.int64), noise).nll
    gap = (p[..., 0] - p[..., 1]) / (0.7 + v.sum(-1)).sqrt()
    assert found.numpy() == pytest.approx(-stats.norm.logcdf(gap.numpy()))


def test_the_probabilities_of_ten_classes_are_close_to_those_of_quadrature():
    p, v = logits(200, 10)
    noise = torch.tensor([[[0.7]]], dtype=torch.float64)
    labels = [torch.full((1, 200), label) for label in range(10)]
    found = torch.stack([-channels.probit_output(p, v, y, noise).nll for y in labels], -1)
    exact = channels.probit_probabilities(p, v, noise)
    divergence = (exact * (exact.log() - found)).sum(-1).mean()
    assert 0 < float(divergence) < 0.05  # nats; 0.6 is the entropy
