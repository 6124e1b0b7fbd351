"""IVON against the published algorithm, walked by hand, and against Bayes' rule."""

import attrs
import pytest
import torch
from torch import nn

from bfl_ivon.barycentre import GEOMETRIES, barycentre
from bfl_ivon.ivon import Ivon
from bfl_ivon.plugin import FedIvon
from bflcore import Broadcast, Gaussian
from bflcore.engines.local import Local
from bflcore.problem.likelihoods import GaussianNoise
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import (
    cohort,
    first_broadcast,
    gaussian,
    generator,
    problem,
    separable,
)

FULL = {"batch_size": 100}  # one batch is all samples
DOUBLE = torch.float64


def gradient(of, weights, client=0):
    x, y = of.train.of(client)
    leaf = weights.clone().requires_grad_()
    of.likelihood.nll(of.forward(leaf[None], x[None])[0], y).mean().backward()
    return leaf.grad


def algorithm_1(of, start, prior, members, steps, *, lr, beta1, beta2, sigma, kl_weight=1, draws=1):
    """Return mean and variance after Algorithm 1, line by line in the paper's letters."""
    n = len(of.train.of(0)[1])
    lam = n / kl_weight
    delta = 1 / (lam * prior.variance)
    m, h = start.mean.clone(), 1 / (lam * start.variance) - delta
    alpha = lr / (lam * sigma**2)  # alpha (h_0 + delta)
    g = torch.zeros_like(m)
    (stream,) = members.streams("noise")
    s = 1 / (lam * (h + delta)).sqrt()
    for t in range(1, steps + 1):
        estimates = []
        for _ in range(draws):
            theta = m + s * torch.empty_like(m).normal_(generator=stream)
            ghat = gradient(of, theta)
            estimates.append((ghat, ghat * (theta - m) / s**2))
        ghat, hhat = (torch.stack(each).mean(0) for each in zip(*estimates, strict=True))
        g = beta1 * g + (1 - beta1) * ghat
        h = beta2 * h + (1 - beta2) * hhat + 0.5 * (1 - beta2) ** 2 * (h - hhat) ** 2 / (h + delta)
        gbar = g / (1 - beta1**t)
        m = m - alpha * (gbar + delta * (m - prior.mean)) / (h + delta)
        s = 1 / (lam * (h + delta)).sqrt()
    return m, s**2


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("kl_weight", [1.0, 0.2])
@pytest.mark.parametrize("kind", ["per parameter", "one variance", "around zero"])
def test_ivon_takes_the_steps_of_the_published_algorithm(kind, kl_weight, draws):
    of = problem(sizes=(9,))
    prior = {
        "per parameter": gaussian(of.layout.total, seed=5),
        "one variance": Gaussian(of.initial + 1, torch.full_like(of.initial, 0.4)),
        "around zero": Gaussian(torch.zeros_like(of.initial), torch.full_like(of.initial, 0.4)),
    }[kind]
    start = Gaussian(of.initial, 0.1 * gaussian(of.layout.total, seed=7).variance)
    options = {"kl_weight": kl_weight, "draws": draws, "lr": 0.02}
    inference = Ivon(
        momentum=0.8, hessian_momentum=0.9, initial_sigma=0.3, local_epochs=7, **options, **FULL
    )
    members = cohort(of, inference)
    found = inference.fit(of, Broadcast(0, start, prior), members).posterior
    mean, variance = algorithm_1(
        of, start, prior, members, 7, beta1=0.8, beta2=0.9, sigma=0.3, **options
    )
    torch.testing.assert_close(found.mean[0], mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.variance[0], variance, rtol=1e-9, atol=1e-12)


def regression(inputs, samples, dtype, noise=0.5):
    """Return a linear regression with correlated inputs, and the mean-field optimum under N(0, 1).

    The optimum of mean-field variational inference for a Gaussian posterior N(mu, Lambda^-1) is
    mean mu and precision diag(Lambda).
    """
    seeded = torch.Generator().manual_seed(3)
    x = torch.randn(samples, inputs, generator=seeded, dtype=DOUBLE)
    x += 0.5 * torch.randn(samples, 1, generator=seeded, dtype=DOUBLE)
    y = x @ torch.randn(inputs, 1, generator=seeded, dtype=DOUBLE) * inputs**-0.5
    y += noise**0.5 * torch.randn(samples, 1, generator=seeded, dtype=DOUBLE)
    network = nn.Sequential(nn.Linear(inputs, 1, bias=False))
    of = separable(
        (samples,),
        network=network,
        likelihood=GaussianNoise(noise_variance=noise),
        data=(x, y),
        dtype=dtype,
    )
    precision = x.T @ x / noise + torch.eye(inputs, dtype=DOUBLE)
    mean = torch.linalg.solve(precision, x.T @ y / noise)[:, 0]
    return of, Gaussian(mean, 1 / precision.diagonal())


def test_ivon_converges_to_the_mean_field_optimum_of_linear_regression():
    of, optimum = regression(4, 40, DOUBLE)
    inference = Ivon(prior_sigma=1.0, initial_sigma=0.1, local_epochs=2500, **FULL)
    prior = inference.prior(of)
    broadcast = Broadcast(0, inference.initial(of), prior)
    for number, lr in enumerate((0.03, 0.003)):
        inference = inference.replace(lr=lr)
        found = inference.fit(of, broadcast, cohort(of, inference, round=number)).posterior[0]
        broadcast = Broadcast(number + 1, found, prior)
    off = (found.mean - optimum.mean) / optimum.variance.sqrt()
    assert float(off.abs().max()) < 0.15
    assert float((optimum.variance / found.variance - 1).abs().max()) < 0.15


def test_shared_noise_finds_the_same_variances_as_new_noise():
    """Of a regression on zeros, in which every sample sees 82 of 16,400 parameters."""
    count, noise = 16_400, 0.5
    x = torch.randn(200, 200, count // 200, generator=generator(3)) * torch.eye(200)[:, :, None]
    x = x.view(200, count)
    of = separable(
        (200,),
        network=nn.Sequential(nn.Linear(count, 1, bias=False)),
        likelihood=GaussianNoise(noise_variance=noise),
        data=(x, torch.zeros(200, 1)),
        dtype=torch.float32,
    )
    optimum = Gaussian(torch.zeros(count), 1 / (x.square().sum(0) / noise + 1))
    prior = Gaussian(torch.zeros(count), torch.ones(count))
    ratios = []
    for windows in (1, 64):
        inference = Ivon(
            lr=1e-4, initial_sigma=0.1, noise_windows=windows, local_epochs=100, **FULL
        )
        found = inference.fit(of, Broadcast(0, optimum, prior), cohort(of, inference)).posterior[0]
        ratios.append(optimum.variance / found.variance)
    new, shared = ratios
    # The estimates scatter about the optimum, by the same amount.
    assert abs(float(new.mean()) - 1) < 0.02
    assert abs(float(shared.mean()) - 1) < 0.02
    assert abs(float(shared.std() / new.std()) - 1) < 0.1


def test_a_mask_fixes_mean_and_variance_of_what_it_hides():
    of = problem(sizes=(9, 5), sharing="body", novel=(1,))
    inference = Ivon(local_epochs=2, batch_size=4)
    broadcast = first_broadcast(inference, of)
    members = attrs.evolve(cohort(of, inference, [1]), novel=True)
    memory = inference.personalise(of, broadcast, members)
    moved = memory["personal.mean"] - members.memory["personal.mean"]
    assert bool((moved != 0).all())
    fitted = inference.replace(own_share=1.0)
    members = attrs.evolve(cohort(of, fitted, [1]), novel=True)
    own = fitted.personalise(of, broadcast, members)
    assert bool((own["own.mean"] != of.initial).all())  # all parameters train


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_clients_predict_with_the_barycentre_of_the_servers_posterior_and_their_own(geometry):
    of = problem(sizes=(9, 5), sharing="body")
    inference = Ivon(own_share=0.25, geometry=geometry, local_epochs=2, batch_size=4)
    members, broadcast = cohort(of, inference), first_broadcast(inference, of)
    trained = inference.fit(of, broadcast, members)
    own = Gaussian(trained.memory["own.mean"], trained.memory["own.variance"])
    shared, personal = own.split(of.layout)
    torch.testing.assert_close(shared.pack(), trained.posterior.pack())
    torch.testing.assert_close(personal.mean, trained.memory["personal.mean"])
    following = attrs.evolve(broadcast, round=1, start=trained.posterior[0])
    after = attrs.evolve(members, memory=trained.memory)
    ready = attrs.evolve(after, memory=inference.personalise(of, following, after))
    found = inference.posterior(of, following, ready).split(of.layout)
    server = following.start.map(lambda t: t.expand(2, -1))
    expected = barycentre(server, shared, 0.25, geometry)
    torch.testing.assert_close(found[0].pack(), expected.pack())
    torch.testing.assert_close(found[1].pack(), personal.pack())


def test_a_client_that_never_trained_predicts_with_the_servers_posterior():
    of = problem(sizes=(9, 5))
    inference = Ivon(own_share=0.5)
    members, broadcast = cohort(of, inference), first_broadcast(inference, of)
    memory = inference.personalise(of, broadcast, members)
    ready = attrs.evolve(members, memory=memory)
    for name, tensor in inference.posterior(of, broadcast, ready).pack().items():
        torch.testing.assert_close(tensor[1], broadcast.start.pack()[name])
    assert all(bool(tensor.isfinite().all()) for tensor in memory.values())


def test_without_an_own_share_nothing_is_kept_or_averaged():
    of = problem(sizes=(9, 5))
    inference = Ivon()
    members = cohort(of, inference)
    assert "own.mean" not in inference.initial_memory(of)
    found = inference.personalise(of, first_broadcast(inference, of), members)
    assert dict(found) == dict(members.memory)


def test_fedivons_server_averages_hessians_by_examples():
    """Pal et al. 2025, server: h = sum w_k h_k, mean = sum w_k h_k m_k / h with w_k = n_k / n."""
    sizes, decay = torch.tensor([30.0, 10.0]).double(), 1e-9  # hardly any prior
    h, m = gaussian(2, 6, seed=1).variance, gaussian(2, 6, seed=1).mean
    clients = Gaussian(m, 1 / (sizes[:, None] * h + decay))
    rule, weighting = FedIvon.aggregator, FedIvon.weighting
    prior = Gaussian(torch.zeros(6).double(), torch.full((6,), 1 / decay).double())
    weights = weighting.weigh(clients, sizes, prior)
    found = rule.fuse(clients, weights, prior)
    w = (sizes / sizes.sum())[:, None]
    torch.testing.assert_close(found.mean, (w * h * m).sum(0) / (w * h).sum(0))
    torch.testing.assert_close(1 / found.variance, sizes.mean() * (w * h).sum(0))


def test_rounds_of_fedivon_learn():
    of = separable()
    inference = FedIvon.inference.replace(local_epochs=5, batch_size=4)
    recipe = Recipe(inference, FedIvon.aggregator, FedIvon.weighting, FedIvon.hyper)
    broadcast, losses = begin(recipe, of), []
    with Local(workers=1).open(of, inference, 10) as session:
        for _ in range(10):
            done = run_round(recipe, session, broadcast, of.clients)
            broadcast = done.broadcast
            losses.append(done.loss)
    assert losses[-1] < 0.6 * losses[0]
