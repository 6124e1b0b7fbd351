"""Mean-field variational inference against closed forms, autograd and clients alone."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from bflcore import Broadcast, Gaussian, Variational
from bflcore.inference.estimators import estimator
from bflcore.inference.gradient import batches
from bflcore.inference.variational import fit_gaussians, prior_of_cohort
from bflcore.problem.likelihoods import GaussianNoise
from bflcore.testing.problems import (
    IMAGE,
    cohort,
    convolutional,
    first_broadcast,
    gaussian,
    normal,
    problem,
)

NAMES = ("reparameterisation", "local-reparameterisation", "flipout")
each_estimator = pytest.mark.parametrize("name", NAMES)
ONE_STEP = {"optimiser": "sgd", "local_epochs": 1, "batch_size": 100, "initial_sigma": 0.3}
SHORT = {"lr": 0.02, "local_epochs": 2, "batch_size": 3, "initial_sigma": 0.3}


def fitted(inference, of, members=None, broadcast=None, **more):
    members = members or cohort(of, inference)
    broadcast = broadcast or first_broadcast(inference, of)
    return fit_gaussians(inference, of, broadcast, members, **more)


def rho(posterior):
    """Return the logarithm of the standard deviation."""
    return posterior.variance.log() / 2


def divergence_gradient(posterior, prior):
    """Return the gradient of KL(q || prior) in the mean and in log sigma, by autograd."""
    mean, r = posterior.mean.clone().requires_grad_(), rho(posterior).requires_grad_()
    kl = Gaussian(mean, (2 * r).exp()).kl(prior)
    return torch.autograd.grad(kl.sum(), (mean, r))


def test_the_initial_posterior_lies_around_the_networks_initialisation():
    of, inference = problem(), Variational(initial_sigma=0.2)
    initial = inference.initial(of)
    assert torch.equal(initial.mean, of.initial)
    torch.testing.assert_close(initial.variance, torch.full_like(of.initial, 0.04))


def test_the_first_prior_is_the_initial_posterior_unless_it_is_given():
    of = problem()
    same = Variational(initial_sigma=0.2).prior(of)
    assert torch.equal(same.mean, of.initial)
    torch.testing.assert_close(same.variance, torch.full_like(of.initial, 0.04))
    given = Variational(prior_sigma=3.0).prior(of)
    assert not given.mean.any()
    assert given.variance.tolist() == [9.0] * of.layout.total


@pytest.mark.parametrize("sharing", ["all", "body", "none"])
@pytest.mark.parametrize("personal_prior", ["initial", "previous"])
def test_the_prior_of_a_cohort_joins_the_servers_half_with_each_clients(sharing, personal_prior):
    of = problem(sharing=sharing)
    inference = Variational(prior_sigma=2.0, personal_prior=personal_prior)
    sent = gaussian(of.layout.shared_total, seed=20)
    own = gaussian(3, of.layout.personal_total, seed=30)
    members = attrs.evolve(cohort(of, inference), memory=own.pack("personal."))
    found = prior_of_cohort(inference, of, Broadcast(0, sent, sent), members)
    first = inference.prior(of).split(of.layout)[1]
    for row in range(3):
        expected = sent.join(own[row] if personal_prior == "previous" else first, of.layout)
        assert torch.equal(found.mean[row], expected.mean)
        assert torch.equal(found.variance[row], expected.variance)


@each_estimator
@pytest.mark.parametrize("draws", [1, 3])
def test_a_step_follows_the_mean_of_the_draws_and_the_divergence(name, draws):
    of = problem()
    inference = Variational(lr=0.05, estimator=name, draws=draws, kl_weight=0.4, **ONE_STEP)
    start, prior = gaussian(of.layout.total, seed=10), gaussian(of.layout.total, seed=20)
    members = cohort(of, inference, [0])
    result = fitted(inference, of, members, Broadcast(0, start, prior))
    (batch,) = batches(inference, members)
    estimate = estimator(name, of, members.streams("noise"), members.x[0, :1])
    arguments = start.mean[None], start.variance.sqrt()[None], batch
    found = [[t.clone() for t in estimate(*arguments)] for _ in range(draws)]
    loss, d_mean, d_rho = (torch.stack(parts).mean(0)[0] for parts in zip(*found, strict=True))
    kl_mean, kl_rho = divergence_gradient(start, prior)
    step_mean, step_rho = d_mean + 0.4 / 7 * kl_mean, d_rho + 0.4 / 7 * kl_rho
    torch.testing.assert_close(result.posterior.mean[0], start.mean - 0.05 * step_mean)
    torch.testing.assert_close(rho(result.posterior)[0], rho(start) - 0.05 * step_rho)
    torch.testing.assert_close(result.loss[0], loss)


def test_the_divergence_counts_once_an_epoch_for_each_client():
    of = problem()
    start, prior = gaussian(of.layout.total, seed=10), gaussian(of.layout.total, seed=20)
    sent = Broadcast(0, start, prior)
    with_kl, without = (
        fitted(Variational(lr=1e-3, kl_weight=weight, **ONE_STEP), of, broadcast=sent)
        for weight in (1.0, 0.0)
    )
    kl_mean, kl_rho = divergence_gradient(start, prior)
    for row, size in enumerate((7, 5, 2)):
        moved = (without.posterior.mean - with_kl.posterior.mean)[row] / 1e-3
        spread = (rho(without.posterior) - rho(with_kl.posterior))[row] / 1e-3
        torch.testing.assert_close(moved, kl_mean / size, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(spread, kl_rho / size, rtol=1e-8, atol=1e-8)
    assert torch.equal(with_kl.loss, without.loss)


def test_without_weight_the_prior_does_not_matter():
    of, inference = problem(), Variational(kl_weight=0.0, **SHORT)
    start = gaussian(of.layout.total, seed=10)
    one, other = (
        fitted(inference, of, broadcast=Broadcast(0, start, gaussian(of.layout.total, seed=seed)))
        for seed in (20, 30)
    )
    assert torch.equal(one.posterior.mean, other.posterior.mean)
    assert torch.equal(one.posterior.variance, other.posterior.variance)


@each_estimator
def test_under_a_huge_weight_the_posterior_returns_to_the_prior(name):
    of = problem(sizes=(6,))
    prior = gaussian(of.layout.total, seed=20)
    start = Gaussian(prior.mean + 0.3, 2 * prior.variance)
    inference = Variational(lr=0.02, kl_weight=1e6, local_epochs=200, batch_size=6, estimator=name)
    posterior = fitted(inference, of, broadcast=Broadcast(0, start, prior)).posterior
    torch.testing.assert_close(posterior.mean[0], prior.mean, rtol=0, atol=1e-2)
    torch.testing.assert_close(rho(posterior)[0], rho(prior), rtol=0, atol=1e-2)


@each_estimator
def test_linear_regression_converges_to_the_exact_mean_field_optimum(name):
    clients, noise, prior_variance = 24, 0.3, 1.5
    of = problem(
        nn.Linear(2, 2, bias=False),
        sizes=(10,) * clients,
        shape=(2,),
        head="",
        likelihood=GaussianNoise(noise_variance=noise),
    )
    inference = Variational(
        lr=0.02,
        local_epochs=300,
        batch_size=10,
        estimator=name,
        draws=2,
        initial_sigma=0.3,
        prior_sigma=prior_variance**0.5,
    )
    x, y = of.train.of(0)
    members = cohort(of, inference)  # all of them are given the first one's data
    members = attrs.evolve(members, x=x.expand_as(members.x), y=y.expand_as(members.y))
    posterior = fitted(inference, of, members).posterior
    precision = (x.T @ x / noise + torch.eye(2) / prior_variance).numpy()
    exact = np.linalg.solve(precision, (x.T @ y / noise).numpy()).T.ravel()
    variance = np.tile(1 / np.diag(precision), 2)
    # The clients differ by their noise alone: their mean is within its own error, and within
    # the two percent by which Adam circles around the optimum.
    means, deviations = posterior.mean.numpy(), posterior.variance.sqrt().numpy()
    for found, expected in ((means, exact), (deviations, variance**0.5)):
        error = found.std(0) / clients**0.5
        assert (np.abs(found.mean(0) - expected) < 5 * error + 0.02 * variance**0.5).all()


@each_estimator
@pytest.mark.parametrize("sharing", ["all", "body"])
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_a_cohort_of_unequal_clients_equals_each_of_them_alone(name, sharing, kind):
    network = {"shape": (3,), "head": "2"}
    if kind == "convolutional":
        network = {"network": convolutional(), "shape": IMAGE, "head": "4"}
    of = problem(sharing=sharing, **network)
    inference = Variational(estimator=name, draws=2, prior_sigma=1.0, **SHORT)
    together = fitted(inference, of)
    for row, client in enumerate(together.clients):
        alone = fitted(inference, of, cohort(of, inference, [client]))
        expected = {**alone.posterior.pack(), **alone.memory, "loss": alone.loss}
        found = {**together.posterior.pack(), **together.memory, "loss": together.loss}
        for field, tensor in expected.items():
            torch.testing.assert_close(found[field][row], tensor[0], rtol=1e-9, atol=1e-9)


@each_estimator
def test_one_clients_broken_data_leaves_the_others_untouched(name):
    of, inference = problem(), Variational(estimator=name, **SHORT)
    members = cohort(of, inference)
    clean = fitted(inference, of, members)
    x = members.x.clone()
    x[1] = torch.nan
    broken = fitted(inference, of, attrs.evolve(members, x=x))
    assert broken.posterior.mean[1].isnan().any()
    for row in (0, 2):
        assert torch.equal(broken.posterior.mean[row], clean.posterior.mean[row])
        assert torch.equal(broken.posterior.variance[row], clean.posterior.variance[row])


@each_estimator
def test_the_same_round_is_fitted_to_the_same_bits_and_another_is_not(name):
    of, inference = problem(), Variational(estimator=name, **SHORT)
    first, again = fitted(inference, of), fitted(inference, of)
    later = fitted(inference, of, cohort(of, inference, round=1))
    assert torch.equal(first.posterior.mean, again.posterior.mean)
    assert torch.equal(first.posterior.variance, again.posterior.variance)
    assert not torch.equal(first.posterior.mean, later.posterior.mean)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_keeps_the_precision_of_the_problem(name, dtype):
    of, inference = problem(dtype=dtype), Variational(estimator=name, **SHORT)
    result = fitted(inference, of)
    assert {t.dtype for t in (*result.posterior.pack().values(), result.loss)} == {dtype}


def test_the_variance_stays_positive_however_hard_it_is_pulled():
    of = problem()
    inference = Variational(**{**SHORT, "lr": 1.0, "local_epochs": 20}, prior_sigma=1e-3)
    variance = fitted(inference, of).posterior.variance
    assert bool((variance > 0).all())
    assert bool(variance.isfinite().all())


def test_a_start_of_zero_variance_can_be_trained():
    of, inference = problem(), Variational(**SHORT)
    certain = Gaussian(of.initial, torch.zeros_like(of.initial))
    sent = Broadcast(0, certain, inference.prior(of))
    result = fitted(inference, of, broadcast=sent)
    assert result.posterior[0].invalid() is None
    assert bool((result.posterior.variance > 0).all())


def test_an_anchor_takes_the_place_of_the_prior():
    of, inference = problem(), Variational(**SHORT)
    anchor = gaussian(of.layout.total, seed=20)
    start = inference.initial(of)
    given = fitted(inference, of, anchor=anchor.map(lambda t: t.expand(3, -1)))
    sent = fitted(inference, of, broadcast=Broadcast(0, start, anchor))
    assert torch.equal(given.posterior.mean, sent.posterior.mean)
    assert torch.equal(given.posterior.variance, sent.posterior.variance)


def test_after_step_is_called_after_each_step():
    of, inference = problem(), Variational(**SHORT)
    seen = []
    result = fitted(inference, of, after_step=lambda theta: seen.append(theta.clone()))
    assert [len(theta) for theta in seen] == [3, 3, 2, 2, 1, 1]
    assert seen[0].shape == (3, 2, of.layout.total)
    torch.testing.assert_close(seen[-1][0, 0], result.posterior.mean[0])
    torch.testing.assert_close(seen[1][2, 1], rho(result.posterior)[2])


def test_an_anchor_that_moves_after_a_step_pulls_from_its_new_place():
    of = problem()
    options = {**ONE_STEP, "local_epochs": 2, "lr": 1e-3, "kl_weight": 2.0}
    inference = Variational(**options)
    start = gaussian(of.layout.total, seed=10)
    sent = Broadcast(0, start, start)
    anchor = start.map(lambda t: t.expand(3, -1).clone())

    def move(theta):
        anchor.mean.add_(0.5)
        anchor.variance.mul_(4.0)

    after_one = {}
    stay = fitted(
        inference,
        of,
        broadcast=sent,
        after_step=lambda theta: after_one.setdefault("theta", theta.clone()),
    )
    moved = fitted(inference, of, broadcast=sent, anchor=anchor, after_step=move)
    # Both took the first step alike; the second differs by the pull of the two anchors alone.
    between = Gaussian(after_one["theta"][:, 0], (2 * after_one["theta"][:, 1]).exp())
    here = divergence_gradient(between, start)
    there = divergence_gradient(between, Gaussian(start.mean + 0.5, 4 * start.variance))
    pull = 1e-3 * 2.0 / torch.tensor([[7.0], [5.0], [2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        stay.posterior.mean - moved.posterior.mean, pull * (there[0] - here[0])
    )
    torch.testing.assert_close(
        rho(stay.posterior) - rho(moved.posterior), pull * (there[1] - here[1])
    )


@each_estimator
def test_a_personal_fit_changes_only_personal_parameters(name):
    of, inference = problem(sharing="body"), Variational(estimator=name, **SHORT)
    sent = first_broadcast(inference, of)
    result = fitted(inference, of, broadcast=sent, trainable="personal")
    assert torch.equal(result.posterior.mean, sent.start.mean.expand(3, -1))
    # The variance goes through a logarithm and back.
    torch.testing.assert_close(result.posterior.variance, sent.start.variance.expand(3, -1))
    before = inference.initial_memory(of)
    for field, tensor in before.items():
        assert bool((result.memory[field] != tensor).all())


def test_a_novel_client_is_given_a_personal_posterior():
    of, inference = problem(sharing="body", novel=(2,)), Variational(**SHORT)
    members, sent = cohort(of, inference, [2]), first_broadcast(inference, of)
    memory = inference.personalise(of, sent, members)
    expected = fitted(inference, of, members, sent, trainable="personal").memory
    assert memory.keys() == members.memory.keys() == expected.keys()
    for field, tensor in expected.items():
        assert torch.equal(memory[field], tensor)
        assert not torch.equal(memory[field], members.memory[field])


@pytest.mark.parametrize(("sharing", "novel"), [("body", False), ("all", True)])
def test_clients_that_trained_or_own_nothing_do_not_adapt(sharing, novel):
    of, inference = problem(sharing=sharing), Variational(**SHORT)
    members = attrs.evolve(cohort(of, inference), novel=novel)
    sent = first_broadcast(inference, of)
    assert inference.personalise(of, sent, members) is members.memory


def test_draws_of_a_prediction_do_not_depend_on_how_the_samples_are_divided():
    of, inference = problem(sharing="body"), Variational(initial_sigma=0.5, predict_draws=4)
    members, sent = cohort(of, inference), first_broadcast(inference, of)

    def predict(x):
        return inference.predict(of, sent, members, x).draws

    whole = predict(members.x)
    assert whole.shape == (3, 4, 7, 2)
    parts = torch.cat([predict(members.x[:, :3]), predict(members.x[:, 3:])], dim=2)
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=0)


def test_a_prediction_averages_over_fifty_draws_unless_told_otherwise():
    of, inference = problem(), Variational()
    members, sent = cohort(of, inference), first_broadcast(inference, of)
    assert inference.predict(of, sent, members, members.x).draws.shape == (3, 50, 7, 2)


def test_a_draw_is_a_network_with_the_noise_of_the_clients_stream():
    of, inference = problem(sharing="body"), Variational(initial_sigma=0.5, predict_draws=3)
    members, sent = cohort(of, inference), first_broadcast(inference, of)
    found = inference.predict(of, sent, members, members.x).draws
    for row, stream in enumerate(members.streams("predict")):
        for s in range(3):
            eps = torch.empty_like(of.initial).normal_(generator=stream)
            outputs = of.forward((of.initial + 0.5 * eps)[None], members.x[row : row + 1])
            torch.testing.assert_close(found[row, s], outputs[0].softmax(-1))


def test_the_memory_of_a_prediction_does_not_grow_with_the_draws(monkeypatch):
    of, inference = problem(), Variational(predict_draws=7)
    members, sent = cohort(of, inference), first_broadcast(inference, of)
    sizes = []
    forward = type(of).forward

    def recorded(self, weights, x):
        sizes.append(tuple(weights.shape))
        return forward(self, weights, x)

    monkeypatch.setattr(type(of), "forward", recorded)
    inference.predict(of, sent, members, members.x)
    assert sizes == [(3, of.layout.total)] * 7


def test_clients_and_draws_of_a_prediction_differ():
    of, inference = problem(), Variational(initial_sigma=0.5, predict_draws=4)
    members, sent = cohort(of, inference), first_broadcast(inference, of)
    x = members.x[:1].expand_as(members.x)
    draws = inference.predict(of, sent, members, x).draws
    assert len({float(value) for value in draws[:, :, 0, 0].flatten()}) == 12


def test_a_prediction_has_the_moments_of_the_linear_models_predictive():
    noise = 0.2
    of = problem(nn.Linear(3, 2), head="", likelihood=GaussianNoise(noise_variance=noise))
    inference, count = Variational(predict_draws=2000), 2000
    posterior = gaussian(of.layout.total, seed=10)
    members = cohort(of, inference, [0])
    sent = Broadcast(0, posterior, posterior)
    predictive = inference.predict(of, sent, members, members.x)
    assert float(predictive.noise) == pytest.approx(noise)
    design = torch.cat([members.x[0], torch.ones(7, 1, dtype=torch.float64)], dim=1)
    mean, variance = (
        torch.cat([t[:6].view(2, 3), t[6:, None]], dim=1)
        for t in (posterior.mean, posterior.variance)
    )
    center, spread = design @ mean.T, design.square() @ variance.T
    draws = predictive.draws[0]
    assert bool(((draws.mean(0) - center).abs() < 5 * (spread / count).sqrt()).all())
    # A sample variance of normals has the relative error sqrt(2 / n).
    assert bool(((draws.var(0) / spread - 1).abs() < 5 * (2 / count) ** 0.5).all())


def test_fitting_changes_neither_the_problem_nor_what_was_sent():
    of, inference = problem(sharing="body"), Variational(**SHORT)
    members, sent = cohort(of, inference), first_broadcast(inference, of)
    tensors = [
        *of.network.parameters(),
        of.initial,
        members.x,
        *members.memory.values(),
        *sent.start.pack().values(),
        *sent.prior.pack().values(),
        normal(1),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    for name in NAMES:
        fitted(attrs.evolve(inference, estimator=name), of, members, sent)
        fitted(attrs.evolve(inference, estimator=name), of, cohort(of, inference, [0]), sent)
    assert all(map(torch.equal, before, tensors))
