"""Sites: the product of the prior and all sites is the posterior, and data count once."""

from __future__ import annotations

import attrs
import pytest
import torch

from bflcore import Continual, DenseGaussian, Equal, Gaussian, ProductOfChanges, component
from bflcore.engines.local import Local
from bflcore.inference.sites import CORRECTED, SiteMemory, exact_natural
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.conjugate import ExactSites, pooled, regression
from bflcore.testing.problems import cohort, first_broadcast, gaussian, normal


@component
class Vague(ExactSites):
    """Less certain after seeing data than before."""

    name = "vague"

    def tilt(self, problem, broadcast, cohort, cavity):
        found, loss = super().tilt(problem, broadcast, cohort, cavity)
        return Gaussian(found.mean, 4 * cavity.variance), loss


@component
class Restless(ExactSites):
    """Moves although it saw nothing, as an optimiser that starts elsewhere does."""

    name = "restless"

    def tilt(self, problem, broadcast, cohort, cavity):
        found, loss = super().tilt(problem, broadcast, cohort, cavity)
        return Gaussian(found.mean + 1, found.variance / 2), loss


def recipe(inference):
    return Recipe(inference, ProductOfChanges(), Equal(), Continual())


def drift(of, inference, broadcast, memories):
    """How far q is from p0 prod t_k, relative to its own natural parameters."""
    product = exact_natural(inference.prior(of))
    for memory in memories.values():
        site = SiteMemory.unpack(memory, Gaussian).site
        product = {name: t + site[name] for name, t in product.items()}
    found = exact_natural(broadcast.start)
    precision = (found["precision"] / product["precision"] - 1).abs().max()
    means = [one["shift"] / one["precision"] for one in (found, product)]
    scale = means[1].abs() + product["precision"].rsqrt()
    return float(torch.maximum(precision, ((means[0] - means[1]) / scale).abs().max()))


def run(of, inference, rounds, asked=lambda number, clients: clients):
    """Train; return the last broadcast and the memories."""
    with Local(workers=1).open(of, inference, bins=1) as session:
        broadcast = begin(recipe(inference), of)
        for number in range(rounds):
            clients = asked(number, of.clients)
            broadcast = run_round(recipe(inference), session, broadcast, clients, 0).broadcast
        return broadcast, {client: dict(session.memories[client]) for client in session.memories}


@pytest.mark.parametrize("damping", [1.0, 0.3])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_q_is_the_product_of_prior_and_sites_after_300_rounds_of_some_clients(
    dtype, error, damping
):
    of, inference = regression(dtype=dtype), ExactSites(damping=damping)
    generator = torch.Generator().manual_seed(0)

    def asked(number, clients):
        return tuple(c for c in clients if torch.rand((), generator=generator) < 0.5)

    assert drift(of, inference, *run(of, inference, 300, asked)) < error


def test_precisions_are_exact_as_soon_as_every_client_has_replied_once():
    of, inference = regression(condition=50.0, inputs=6), ExactSites()
    broadcast, _ = run(of, inference, 4, lambda number, clients: clients[number : number + 1])
    due = pooled(of, inference.initial(of))[1].diagonal()
    torch.testing.assert_close(1 / broadcast.start.variance, due, rtol=1e-9, atol=0)


def test_more_rounds_count_no_data_again():
    once, often = (run(regression(), ExactSites(), rounds)[0].start.variance for rounds in (1, 20))
    torch.testing.assert_close(once, often, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("condition", "rounds", "error"), [(5.0, 20, 0.1), (50.0, 50, 0.1)])
def test_means_are_within_a_tenth_of_a_posterior_deviation(condition, rounds, error):
    of, inference = regression((50,) * 10, 10, condition), ExactSites(damping=0.5)
    mean, full = pooled(of, inference.initial(of))
    assert torch.linalg.cond(full) > 0.9 * condition
    sd = torch.linalg.inv(full).diagonal().sqrt()
    apart = (run(of, inference, rounds)[0].start.mean - mean) / sd
    assert float(apart.abs().max()) < error


def test_momentum_brings_fifty_coefficients_within_a_tenth_of_a_posterior_deviation():
    of = regression((50,) * 10, 50, 50.0)
    apart = {}
    for momentum in (0.0, 0.5):
        inference = ExactSites(damping=0.5, momentum=momentum)
        mean, full = pooled(of, inference.initial(of))
        assert torch.linalg.cond(full) > 40
        sd = torch.linalg.inv(full).diagonal().sqrt()
        found = run(of, inference, 50)[0].start
        apart[momentum] = float(((found.mean - mean) / sd).abs().max())
        torch.testing.assert_close(1 / found.variance, full.diagonal(), rtol=1e-9, atol=0)
    assert apart[0.5] < 0.1 < apart[0.0]


def test_a_client_adds_a_share_of_its_last_change_of_the_mean():
    of, inference = regression((8, 8)), ExactSites(damping=0.5, momentum=0.4)
    sent, group = first_broadcast(inference, of), cohort(of, inference)
    first = inference.fit(of, sent, group)
    assert not first.memory["velocity"].any()  # of a first reply
    sent = attrs.evolve(sent, start=first.posterior[0], prior=first.posterior[0])
    second = inference.fit(of, sent, attrs.evolve(group, memory=first.memory))
    moved = second.posterior.mean - sent.prior.mean
    torch.testing.assert_close(second.memory["velocity"], moved / second.posterior.variance)
    again = inference.fit(of, sent, attrs.evolve(group, memory=second.memory)).posterior
    still = dict(second.memory) | {"velocity": torch.zeros(2, 3).double()}
    plain = inference.fit(of, sent, attrs.evolve(group, memory=still)).posterior
    torch.testing.assert_close(again.variance, plain.variance)
    push = (again.mean - plain.mean) / plain.variance
    torch.testing.assert_close(push, 0.4 * second.memory["velocity"])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_q_is_the_product_of_prior_and_sites_with_momentum(dtype, error):
    of, inference = regression(dtype=dtype), ExactSites(damping=0.5, momentum=0.5)
    generator = torch.Generator().manual_seed(0)

    def asked(number, clients):
        return tuple(c for c in clients if torch.rand((), generator=generator) < 0.7)

    assert drift(of, inference, *run(of, inference, 60, asked)) < error


def test_clients_that_take_turns_converge_without_damping():
    of, inference = regression((50,) * 10, 10, 50.0), ExactSites()
    mean, full = pooled(of, inference.initial(of))
    turns = run(of, inference, 200, lambda number, clients: (clients[number % len(clients)],))
    sd = torch.linalg.inv(full).diagonal().sqrt()
    assert float(((turns[0].start.mean - mean) / sd).abs().max()) < 0.1


def test_clients_that_change_together_without_damping_overshoot():
    of, inference = regression((50,) * 10, 10, 50.0), ExactSites()
    mean, _ = pooled(of, inference.initial(of))
    assert float((run(of, inference, 50)[0].start.mean - mean).abs().max()) > 10


def test_a_client_sends_what_it_stores():
    of, inference = regression(dtype=torch.float32), ExactSites(damping=0.7)
    sent = first_broadcast(inference, of)
    result = inference.fit(of, sent, cohort(of, inference))
    before = exact_natural(sent.prior)
    site = SiteMemory.unpack(result.memory, Gaussian).site
    for name, tensor in exact_natural(result.posterior).items():
        assert torch.equal(tensor - before[name], site[name])
        assert site[name].dtype == torch.float64


def test_a_client_that_loses_certainty_is_corrected_and_counted():
    of, inference = regression(), Vague()
    sent = first_broadcast(inference, of)
    result = inference.fit(of, sent, cohort(of, inference))
    assert result.statistics[CORRECTED].tolist() == [3.0] * 4
    torch.testing.assert_close(
        result.posterior.variance, sent.prior.variance.expand(4, -1), rtol=1e-12, atol=0
    )
    found = inference.tilt(
        of, sent, cohort(of, inference), sent.prior.map(lambda t: t.expand(4, -1))
    )[0]
    torch.testing.assert_close(result.posterior.mean, found.mean)


@pytest.mark.parametrize("inference", [Vague(), ExactSites()], ids=["vague", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sites_never_have_a_negative_precision_whoever_takes_part(inference, dtype):
    of = regression(dtype=dtype, scale=100.0)
    generator = torch.Generator().manual_seed(1)

    def asked(number, clients):
        return tuple(c for c in clients if torch.rand((), generator=generator) < 0.5)

    broadcast, memories = run(of, inference, 60, asked)
    precision = 1 / broadcast.start.variance.double()
    assert bool((precision >= 0.5 * (1 - 1e-5)).all())
    for memory in memories.values():
        assert bool((memory["site.precision"] >= -1e-5 * precision).all())


def test_a_cavity_that_rounding_made_improper_is_raised_and_counted():
    of, inference = regression(), ExactSites()
    sent, group = first_broadcast(inference, of), cohort(of, inference)
    prior = exact_natural(sent.prior)
    overdone = {"site.precision": 1.5 * prior["precision"], "site.shift": 0 * prior["shift"]}
    memory = dict(group.memory) | {n: t.expand(4, -1) for n, t in overdone.items()}
    result = inference.fit(of, sent, attrs.evolve(group, memory=memory))
    assert result.statistics[CORRECTED].tolist() == [3.0] * 4
    assert result.posterior[0].invalid() is None


def test_a_client_without_samples_sends_the_prior_and_keeps_its_site():
    of, inference = regression((6, 0)), Restless()
    sent = first_broadcast(inference, of)
    result = inference.fit(of, sent, cohort(of, inference, [0, 1]))
    assert torch.equal(result.posterior.mean[1], sent.prior.mean)
    assert torch.equal(result.posterior.variance[1], sent.prior.variance)
    assert not result.memory["site.precision"][1].any()
    assert result.memory["site.precision"][0].all()


def test_personal_parameters_have_the_first_prior_and_no_site():
    of, inference = regression(sharing="none"), ExactSites()
    sent = first_broadcast(inference, of)
    group = cohort(of, inference)
    first = inference.fit(of, sent, group)
    again = inference.fit(of, sent, attrs.evolve(group, memory=first.memory))
    assert first.memory["site.precision"].shape == (4, 0)
    for name in ("personal.mean", "personal.variance"):
        assert torch.equal(first.memory[name], again.memory[name])


def test_a_memory_comes_back_from_its_tensors():
    site = exact_natural(gaussian(3, 5))
    memory = SiteMemory(personal=gaussian(3, 2), site=site)
    packed = memory.pack()
    again = SiteMemory.unpack(packed, Gaussian)
    assert sorted(packed) == ["personal.mean", "personal.variance", "site.precision", "site.shift"]
    assert all(torch.equal(t, again.pack()[name]) for name, t in packed.items())


def matrices(clients, size, seed):
    roots = normal(clients, size, size, seed=seed)
    return roots @ roots.mT + 0.1 * torch.eye(size, dtype=torch.float64)


def test_a_precision_matrix_is_raised_only_in_the_directions_that_lack_it():
    least = {"precision": matrices(2, 4, 7), "shift": normal(2, 4)}
    mean = normal(2, 4, seed=8)
    # The first client's precision exceeds the bound in two directions and falls short in two.
    vectors = torch.linalg.qr(normal(4, 4, seed=9)).Q
    gap = vectors @ torch.diag(torch.tensor([1.0, 0.5, -0.3, -2.0]).double()) @ vectors.T
    factor = {
        "precision": torch.stack([least["precision"][0] + gap, 2 * least["precision"][1]]),
        "shift": normal(2, 4, seed=10),
    }
    any_one = DenseGaussian(mean, least["precision"])
    found, raised = any_one.at_least(factor, least, mean)
    assert raised.tolist() == [2, 0]
    excess = torch.linalg.eigvalsh(found["precision"][0] - least["precision"][0])
    torch.testing.assert_close(excess, torch.tensor([0.0, 0.0, 0.5, 1.0]).double())
    torch.testing.assert_close(found["shift"][0], found["precision"][0] @ mean[0])
    assert all(torch.equal(found[name][1], factor[name][1]) for name in factor)
