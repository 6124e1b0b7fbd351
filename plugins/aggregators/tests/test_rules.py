"""The rules against closed forms, quadrature and brute force; zero variances; floors; precision."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bfl_aggregators.plugin import (
    RULES,
    Conflation,
    LinearPool,
    LogLinearPool,
    Median,
    TrimmedMean,
    WeightConsolidation,
    WeightedConflation,
    WeightedSum,
)
from bflcore import Gaussian, OptionError, Point
from bflcore.aggregation import COORDINATES
from bflcore.testing.problems import gaussian, normal

DOUBLE = torch.float64
WEIGHTS = torch.tensor([3.0, 1.0, 0.5, 7.0], dtype=DOUBLE)
SHARE = (WEIGHTS / WEIGHTS.sum()).numpy()
CLIENTS = gaussian(4, 6)
PRIOR = Gaussian(normal(6, seed=9), 5 * CLIENTS.variance.amax(0))
MEAN, VARIANCE = CLIENTS.mean.numpy(), CLIENTS.variance.numpy()
each_rule = pytest.mark.parametrize("rule", [rule() for rule in RULES], ids=lambda r: r.name)


def one(*means, variance=1.0):
    """Return clients over one parameter."""
    spread = torch.tensor(variance, dtype=DOUBLE).expand(len(means))
    return Gaussian(torch.tensor(means, dtype=DOUBLE)[:, None], spread[:, None].clone())


def start(mean=0.0, variance=1.0):
    return Gaussian(torch.tensor([mean], dtype=DOUBLE), torch.tensor([variance], dtype=DOUBLE))


def density_moments(log_density):
    """Return mean and variance of an unnormalised density by quadrature."""
    grid = np.linspace(-40, 40, 400_001)
    values = np.exp(log_density(grid) - log_density(grid).max())
    mass = integrate.simpson(values, x=grid)
    mean = integrate.simpson(grid * values, x=grid) / mass
    return mean, integrate.simpson((grid - mean) ** 2 * values, x=grid) / mass


def log_densities(grid, parameter):
    scale = np.sqrt(VARIANCE[:, parameter])
    return stats.norm.logpdf(grid[:, None], MEAN[:, parameter], scale).T


@pytest.mark.parametrize("parameter", range(3))
def test_the_linear_pool_has_the_moments_of_the_mixture(parameter):
    fused = LinearPool().fuse(CLIENTS, WEIGHTS, PRIOR)
    mean, variance = density_moments(
        lambda grid: np.log(SHARE @ np.exp(log_densities(grid, parameter)) + 1e-300)
    )
    assert fused.mean[parameter].item() == pytest.approx(mean, rel=1e-8)
    assert fused.variance[parameter].item() == pytest.approx(variance, rel=1e-8)


@pytest.mark.parametrize(
    ("rule", "powers"),
    [
        (LogLinearPool(), SHARE),
        (Conflation(), np.ones(4)),
        (WeightedConflation(), SHARE / SHARE.max()),
    ],
    ids=lambda thing: getattr(thing, "name", ""),
)
@pytest.mark.parametrize("parameter", range(3))
def test_a_product_rule_has_the_moments_of_the_product_of_powers(rule, powers, parameter):
    fused = rule.fuse(CLIENTS, WEIGHTS, PRIOR)
    mean, variance = density_moments(lambda grid: powers @ log_densities(grid, parameter))
    assert fused.mean[parameter].item() == pytest.approx(mean, rel=1e-8)
    assert fused.variance[parameter].item() == pytest.approx(variance, rel=1e-8)


def test_the_weighted_sum_is_the_law_of_a_sum_of_independent_variables():
    fused = WeightedSum().fuse(CLIENTS, WEIGHTS, PRIOR)
    characteristic = np.diag(SHARE) @ VARIANCE @ np.eye(6)
    np.testing.assert_allclose(fused.mean, SHARE @ MEAN)
    np.testing.assert_allclose(fused.variance, SHARE @ characteristic)


def test_consolidation_has_the_moments_of_the_product_over_surplus_priors():
    fused = WeightConsolidation().fuse(CLIENTS, WEIGHTS, PRIOR)
    mu0, s0 = PRIOR.mean.numpy(), PRIOR.variance.numpy()
    for parameter in range(3):
        scale = np.sqrt(s0[parameter])
        mean, variance = density_moments(
            lambda grid, p=parameter, scale=scale: (
                log_densities(grid, p).sum(0) - 3 * stats.norm.logpdf(grid, mu0[p], scale)
            )
        )
        assert fused.mean[parameter].item() == pytest.approx(mean, rel=1e-7)
        assert fused.variance[parameter].item() == pytest.approx(variance, rel=1e-7)


@pytest.mark.parametrize("rule", [LogLinearPool(), Conflation(), WeightedConflation()])
def test_certain_clients_decide_by_their_weighted_mean(rule):
    clients = one(1.0, 5.0, 100.0)
    clients.variance[:2] = 0.0
    fused = rule.fuse(clients, torch.tensor([3.0, 1.0, 8.0]), start())
    expected = 2.0 if rule.weighs else 3.0
    assert (fused.mean.item(), fused.variance.item()) == (expected, 0.0)


def test_a_certain_client_of_weight_zero_decides_nothing():
    clients = one(1.0, 5.0)
    clients.variance[0] = 0.0
    fused = LogLinearPool().fuse(clients, torch.tensor([0.0, 1.0]), start())
    assert (fused.mean.item(), fused.variance.item()) == (5.0, 1.0)


def test_certain_coordinates_leave_their_neighbours_alone():
    clients = Gaussian(CLIENTS.mean, CLIENTS.variance.clone())
    clients.variance[1, 4] = 0.0
    for rule in (LogLinearPool(), Conflation(), WeightedConflation(), WeightConsolidation()):
        fused, before = (rule.fuse(q, WEIGHTS, PRIOR) for q in (clients, CLIENTS))
        others = [0, 1, 2, 3, 5]
        torch.testing.assert_close(fused.mean[others], before.mean[others])
        torch.testing.assert_close(fused.variance[others], before.variance[others])
        assert fused.mean[4].item() == pytest.approx(MEAN[1, 4])


def test_a_variance_that_is_tiny_in_float32_is_not_taken_for_zero():
    tiny = torch.tensor([[1e-40], [3e-40]])
    clients = Gaussian(torch.tensor([[0.0], [4.0]]), tiny)
    fused = Conflation().fuse(clients, torch.ones(2), start().map(torch.Tensor.float))
    assert fused.mean.item() == pytest.approx(1.0, rel=1e-3)
    assert fused.variance.item() == pytest.approx(0.75e-40, rel=1e-3)


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_precisions_of_24_decades_and_weights_of_a_billionth_leave_no_nan(rule, dtype):
    decades = torch.arange(-12.0, 13.0, dtype=DOUBLE)
    variance = torch.stack([10**decades, 10 ** decades.flip(0)]).to(dtype)
    clients = Gaussian(normal(2, 25, dtype=dtype), variance)
    prior = Gaussian(normal(25, seed=5, dtype=dtype), variance.amax(0))
    fused = rule.fuse(clients, torch.tensor([1e-9, 1.0], dtype=DOUBLE), prior)
    assert fused.invalid() is None
    assert bool((fused.variance > 0).all())
    assert fused.mean.dtype == fused.variance.dtype == dtype


@each_rule
def test_weights_may_be_as_small_or_as_large_as_float64_allows(rule):
    clients = CLIENTS.map(torch.Tensor.float)
    prior = PRIOR.map(torch.Tensor.float)
    expected = rule.fuse(clients, WEIGHTS, prior)
    for factor in (1e-100, 1e100):
        fused = rule.fuse(clients, WEIGHTS * factor, prior)
        torch.testing.assert_close(fused.mean, expected.mean)
        torch.testing.assert_close(fused.variance, expected.variance)


def test_the_linear_pool_sees_a_variance_that_is_tiny_beside_the_way_from_the_prior():
    apart = 1e-4
    clients = one(1e6, 1e6 + apart, variance=1e-12)
    exact = float(clients.mean.diff(dim=0)) ** 2 / 4 + 1e-12
    for fused in (
        LinearPool().fuse(clients, torch.ones(2), start()),
        LinearPool().finish(stream(LinearPool(), clients, torch.ones(2), start())),
    ):
        assert fused.variance.item() == pytest.approx(exact, rel=1e-5)


def stream(rule, clients, weights, prior):
    state = rule.start(prior)
    for k in range(len(weights)):
        state = rule.add(state, clients[[k]], weights[[k]])
    return state


@each_rule
def test_blocks_and_groups_do_not_show(rule, monkeypatch):
    monkeypatch.setattr("bflcore.aggregation.COORDINATES", 4)
    monkeypatch.setattr("bflcore.aggregation.CLIENTS", 3)
    small = rule.fuse(CLIENTS, WEIGHTS, PRIOR)
    monkeypatch.undo()
    assert COORDINATES > 6
    large = rule.fuse(CLIENTS, WEIGHTS, PRIOR)
    torch.testing.assert_close(small.mean, large.mean)
    torch.testing.assert_close(small.variance, large.variance)


@each_rule
def test_a_posterior_of_no_parameters_fuses_to_one_of_none(rule):
    nobody = CLIENTS.map(lambda tensor: tensor[:, :0])
    fused = rule.fuse(nobody, WEIGHTS, PRIOR.map(lambda tensor: tensor[:0]))
    assert fused.mean.shape == fused.variance.shape == (0,)


@each_rule
def test_clients_stay_as_they_were(rule):
    before = CLIENTS.map(torch.clone)
    rule.fuse(CLIENTS, WEIGHTS, PRIOR)
    assert torch.equal(before.mean, CLIENTS.mean)
    assert torch.equal(before.variance, CLIENTS.variance)


def floors(clients, prior, **options):
    rule = WeightConsolidation(**options)
    state = rule.add(rule.start(prior), clients, torch.ones(len(clients.mean)))
    return rule.finish(state), rule.report(state)


def test_a_precision_that_is_not_positive_is_floored_and_counted():
    # Three clients less certain than their prior: 3/3 - 2/1 < 0.
    fused, report = floors(one(1.0, 2.0, 6.0, variance=3.0), start())
    assert report == {"floored": 1.0}
    assert (fused.mean.item(), fused.variance.item()) == (pytest.approx(3.0), 1.0)


def test_a_precision_that_is_zero_to_rounding_is_floored():
    fused, report = floors(one(1.0, 3.0, variance=2.0), start())
    assert report == {"floored": 1.0}
    assert fused.variance.item() == 1.0


def test_a_positive_precision_is_left_alone_by_default():
    fused, report = floors(one(1.0, 2.0, variance=1.9), start())
    precision = 2 / 1.9 - 1
    assert report == {"floored": 0.0}
    assert fused.variance.item() == pytest.approx(1 / precision)
    assert fused.mean.item() == pytest.approx(3 / 1.9 / precision)


def test_the_floor_may_be_the_priors_precision():
    fused, report = floors(one(1.0, 2.0, variance=1.9), start(), floor=1.0)
    assert report == {"floored": 1.0}
    assert (fused.mean.item(), fused.variance.item()) == (pytest.approx(1.5), 1.0)


def test_clients_who_learnt_nothing_are_not_floored():
    fused, report = floors(one(*[2.0] * 7, variance=0.3), start(2.0, 0.3), floor=1.0)
    assert report == {"floored": 0.0}
    assert fused.variance.item() == pytest.approx(0.3)


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_a_prior_that_was_certain_is_kept_where_clients_are_not(floor):
    fused, report = floors(one(1.0, 2.0), start(variance=0.0), floor=floor)
    assert report == {"floored": 1.0}
    assert (fused.mean.item(), fused.variance.item()) == (1.5, 0.0)


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_one_client_is_returned_even_if_less_certain_than_its_prior(floor):
    for prior in (start(), start(variance=0.0)):
        fused, report = floors(one(1.0, variance=4.0), prior, floor=floor)
        assert report == {"floored": 0.0}
        assert (fused.mean.item(), fused.variance.item()) == (1.0, 4.0)


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 7, 50])
def test_the_median_is_numpys(clients):
    posteriors = gaussian(clients, 9)
    fused = Median().fuse(posteriors, torch.ones(clients), posteriors[0])
    np.testing.assert_allclose(fused.mean, np.median(posteriors.mean, axis=0))
    np.testing.assert_allclose(fused.variance, np.median(posteriors.variance, axis=0))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.29, 0.49])
@pytest.mark.parametrize("clients", [1, 2, 7, 100])
def test_the_trimmed_mean_is_scipys(clients, fraction):
    posteriors = gaussian(clients, 4)
    fused = TrimmedMean(fraction=fraction).fuse(posteriors, torch.ones(clients), posteriors[0])
    fraction += 1e-9  # 0.29 * 100 is 28.999... to scipy
    np.testing.assert_allclose(
        fused.mean, stats.trim_mean(posteriors.mean.numpy(), fraction), rtol=1e-12
    )
    np.testing.assert_allclose(
        fused.variance, stats.trim_mean(posteriors.variance.numpy(), fraction), rtol=1e-12
    )


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(fraction=0.3)])
@pytest.mark.parametrize("family", ["point", "gaussian"])
def test_a_minority_of_liars_cannot_leave_the_range_of_the_honest(rule, family):
    posteriors = gaussian(7, 5)
    honest = posteriors[2:].mean
    posteriors.mean[:2] = torch.tensor([1e30, -1e30], dtype=DOUBLE)[:, None]
    prior = posteriors[2]
    if family == "point":
        posteriors, prior = Point(posteriors.mean), Point(prior.mean)
    fused = rule.fuse(posteriors, torch.tensor([1e9, 1e9, 1, 1, 1, 1, 1]), prior)
    assert type(fused) is type(prior)
    assert bool((fused.mean <= honest.amax(0)).all())
    assert bool((fused.mean >= honest.amin(0)).all())


@pytest.mark.parametrize("fraction", [-0.1, 0.5, float("nan")])
def test_a_trimmed_mean_of_nobody_is_refused(fraction):
    with pytest.raises(OptionError, match="fraction: .* allowed: at least 0 and below 0.5"):
        TrimmedMean(fraction=fraction)


@pytest.mark.parametrize("rule", [*(rule() for rule in RULES), Median(), TrimmedMean()])
def test_weights_that_are_no_weights_are_refused_even_where_ignored(rule):
    with pytest.raises(OptionError, match="all are zero"):
        rule.fuse(CLIENTS, torch.zeros(4), PRIOR)


@pytest.mark.parametrize("rule", [*(rule() for rule in RULES), Median(), TrimmedMean()],
                         ids=lambda r: r.name)  # fmt: skip
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("variance", -1e-3, "client 2's variance is negative"),
        ("variance", float("nan"), "client 2's variance is not finite"),
        ("mean", float("nan"), "client 2's mean is not finite"),
        ("mean", float("inf"), "client 2's mean is not finite"),
    ],
)
def test_a_posterior_that_is_none_is_refused_by_its_client(rule, field, value, said):
    packed = {name: tensor.clone() for name, tensor in CLIENTS.pack().items()}
    packed[field][2, 3] = value
    with pytest.raises(OptionError, match=said):
        rule.fuse(Gaussian(**packed), WEIGHTS, PRIOR)


@each_rule
def test_a_posterior_of_another_family_is_refused(rule):
    with pytest.raises(OptionError, match=f"family point given to {rule.name}"):
        rule.fuse(Point(CLIENTS.mean), WEIGHTS, PRIOR)
