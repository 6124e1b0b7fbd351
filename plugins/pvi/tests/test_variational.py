"""Partitioned VI: its divergence against quadrature, its objective, and data that count once."""

from __future__ import annotations

import attrs
import pytest
import torch
from scipy import integrate, stats

from bfl_pvi import plugin
from bfl_pvi.robust import GeneralisedCrossEntropy
from bfl_pvi.variational import VariationalSites, renyi, renyi_gradient
from bflcore import (
    Average,
    Categorical,
    Continual,
    Fixed,
    Gaussian,
    IncompatibleError,
    ProductOfChanges,
)
from bflcore.experiments import compatibility
from bflcore.experiments.resolve import resolve
from bflcore.inference.memory import Memory
from bflcore.inference.sites import CORRECTED
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe
from bflcore.testing import parametrize_with_checks
from bflcore.testing.conjugate import pooled, regression
from bflcore.testing.evidence_checks import Event, live_through
from bflcore.testing.problems import cohort, first_broadcast, gaussian, separable
from bflcore.weighting import Equal

QUICK = {"local_epochs": 3, "batch_size": 4, "lr": 0.01}


@parametrize_with_checks(
    [VariationalSites, GeneralisedCrossEntropy, plugin.PVI, plugin.PVIDamped, plugin.FedGVI]
)
def test_conformance(check):
    check.function()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_divergence_is_that_of_quadrature(alpha):
    q, p = stats.norm(0.3, 0.7), stats.norm(-0.4, 1.3)
    power = integrate.quad(lambda w: q.pdf(w) ** alpha * p.pdf(w) ** (1 - alpha), -15, 15)[0]
    due = torch.tensor(power, dtype=torch.float64).log() / (alpha * (alpha - 1))
    mine, theirs = (
        Gaussian(torch.tensor([mean]).double(), torch.tensor([sigma**2]).double())
        for mean, sigma in ((0.3, 0.7), (-0.4, 1.3))
    )
    torch.testing.assert_close(renyi(alpha, mine, theirs), due)


def test_the_divergence_tends_to_kl():
    q, p = gaussian(2, 5), gaussian(2, 5, seed=7)
    torch.testing.assert_close(renyi(1 - 1e-6, q, p), q.kl(p), rtol=1e-5, atol=0)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_gradient_of_the_divergence_is_autograds(alpha):
    mean, anchor = gaussian(2, 5).mean, gaussian(2, 5, seed=7)
    leaves = [mean.requires_grad_(), gaussian(2, 5, seed=3).mean.requires_grad_()]
    value = renyi(alpha, Gaussian(leaves[0], (2 * leaves[1]).exp()), anchor).sum()
    due = torch.autograd.grad(value, leaves)
    found = renyi_gradient(alpha, leaves[0].detach(), leaves[1].detach().exp(), anchor)
    for one, other in zip(found, due, strict=True):
        torch.testing.assert_close(one, other)


def test_renyi_of_order_one_is_kl_in_the_fit_too():
    of = separable()
    near, kl = (VariationalSites(alpha=alpha, **QUICK) for alpha in (1 - 1e-9, 1.0))
    found, due = (
        one.fit(of, first_broadcast(one, of), cohort(of, one)).posterior for one in (near, kl)
    )
    torch.testing.assert_close(found.mean, due.mean)
    torch.testing.assert_close(found.variance, due.variance)


def test_another_order_gives_another_posterior():
    of = separable()
    half, kl = (VariationalSites(alpha=alpha, **QUICK) for alpha in (0.5, 1.0))
    found, due = (
        one.fit(of, first_broadcast(one, of), cohort(of, one)).posterior for one in (half, kl)
    )
    assert not torch.allclose(found.variance, due.variance)


def test_the_head_is_the_clients_own():
    of, inference = separable(sharing="body"), VariationalSites(**QUICK)
    sent, group = first_broadcast(inference, of), cohort(of, inference)
    result = inference.fit(of, sent, group)
    personal = Memory.unpack(result.memory, Gaussian).personal
    fresh = Memory.unpack(group.memory, Gaussian).personal
    assert not torch.equal(personal.mean, fresh.mean)
    assert result.posterior.mean.shape[-1] == of.layout.shared_total


def test_the_local_problem_ends_at_the_exact_posterior():
    of = regression(sizes=(40, 30), scale=0.5)
    inference = VariationalSites(
        lr=0.01, local_epochs=400, batch_size=40, draws=4, estimator="flipout", initial_sigma=0.5
    )
    sent = first_broadcast(inference, of)
    cavity = sent.prior.map(lambda t: t.expand(2, -1))
    found, _ = inference.tilt(of, sent, cohort(of, inference), cavity)
    alone = attrs.evolve(of, train=attrs.evolve(of.train, x=of.train.x[:40], y=of.train.y[:40]))
    mean, full = pooled(alone, sent.prior)
    sd = full.diagonal().rsqrt()
    assert float(((found.mean[0] - mean) / sd).abs().max()) < 0.3
    torch.testing.assert_close(found.variance[0].sqrt(), sd, rtol=0.15, atol=0)


@pytest.mark.parametrize("method", [plugin.PVI, plugin.PVIDamped])
def test_rounds_do_not_make_a_method_more_certain_than_its_data(method):
    of = regression(sizes=(20, 20, 20), scale=0.5)
    inference = method.inference.replace(
        local_epochs=60, batch_size=20, lr=0.02, estimator="flipout", initial_sigma=0.5,
        prior_sigma=None,
    )  # fmt: skip
    recipe = Recipe(inference, ProductOfChanges(), Equal(), Continual())
    lived = [b for b, _ in live_through(recipe, of, [Event(("replies",) * 3)] * 30)]
    due = pooled(of, inference.initial(of))[1].diagonal()
    for broadcast in lived[-5:]:
        ratio = broadcast.start.variance.reciprocal() / due
        assert 0.7 < float(ratio.mean()) < 1.4


@pytest.mark.parametrize(
    ("flags", "named", "fitting"),
    [
        ({"aggregator": {"name": "average"}}, "aggregator average", "product-of-changes"),
        ({"hyper": {"name": "fixed"}}, "hyper fixed", "continual"),
    ],
)
def test_parts_that_break_the_books_are_refused_in_one_line(flags, named, fitting):
    with pytest.raises(IncompatibleError) as error:
        resolve(load_registry(), "pvi", {}, flags)
    message = str(error.value)
    assert named in message
    assert f"that fit: {fitting}" in message
    assert "\n" not in message


def test_the_matrix_knows_which_parts_fit():
    assert compatibility.fits(VariationalSites, ProductOfChanges)
    assert compatibility.fits(VariationalSites, Continual)
    assert not compatibility.fits(VariationalSites, Average)
    assert not compatibility.fits(VariationalSites, Fixed)


def test_corrections_reach_the_server_as_one_number_per_client():
    of, inference = separable(), VariationalSites(**QUICK)
    result = inference.fit(of, first_broadcast(inference, of), cohort(of, inference))
    assert result.statistics[CORRECTED].shape == (3,)


@pytest.mark.parametrize("delta", [0.2, 0.8, 1.0])
def test_the_robust_loss_is_zhang_and_sabuncus(delta):
    outputs, targets = gaussian(6, 3).mean, torch.arange(6) % 3
    likelihood = outputs.softmax(-1)[torch.arange(6), targets]
    found = GeneralisedCrossEntropy(delta=delta).nll(outputs, targets)
    torch.testing.assert_close(found, (1 - likelihood**delta) / delta)


def test_the_robust_loss_tends_to_the_cross_entropy():
    outputs, targets = gaussian(6, 3).mean, torch.arange(6) % 3
    due = Categorical().nll(outputs, targets)
    for delta in (0.0, 1e-12):
        found = GeneralisedCrossEntropy(delta=delta).nll(outputs, targets)
        torch.testing.assert_close(found, due)


def test_a_wrong_label_pulls_less_under_the_robust_loss():
    outputs = torch.tensor([[6.0, 0.0]], requires_grad=True)
    pulls = []
    for loss in (Categorical(), GeneralisedCrossEntropy()):
        (gradient,) = torch.autograd.grad(loss.nll(outputs, torch.tensor([1])).sum(), outputs)
        pulls.append(float(gradient.abs().max()))
    assert pulls[1] < 0.02 * pulls[0]
