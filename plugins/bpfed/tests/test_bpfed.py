"""BPFed against its equations: eq. 7 and 10 by autograd, eq. 11 by hand, its special cases."""

import attrs
import pytest
import torch

from bfl_bpfed.bpfed import ReinforcedVariational
from bflcore import Average, Broadcast, Continual, EmpiricalBayes, Equal, Fixed, Gaussian, Map
from bflcore.engines.local import Local
from bflcore.errors import RoundError
from bflcore.experiments.resolve import resolve
from bflcore.hyper import Accumulate
from bflcore.inference.gradient import batches
from bflcore.inference.normals import Noise
from bflcore.inference.variational import prior_of_cohort
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import cohort, first_broadcast, normal, problem

STEP = {"local_epochs": 1, "batch_size": 100, "optimiser": "sgd", "lr": 0.1}
DOUBLE = torch.float64


def fit(inference, of, broadcast=None):
    members = cohort(of, inference)
    return inference.fit(of, broadcast or first_broadcast(inference, of), members), members


def test_the_recipe_is_the_papers_except_for_the_copies():
    method = resolve(load_registry(), "bpfed", {}, {})
    assert (method.hyper, method.weighting) == (Continual(), Equal())
    assert method.run.share == "body"
    assert method.inference.personal_prior == "previous"
    assert method.inference.reinforce_steps == 0  # the paper's copies are an option


def test_one_step_descends_the_gradient_of_q_as_autograd_finds_it():
    of = problem(sizes=(9,), sharing="body")
    inference = ReinforcedVariational(
        estimator="reparameterisation", kl_weight=0.7, prior_sigma=0.5, **STEP
    )
    fitted, members = fit(inference, of)
    start, prior = inference.initial(of), inference.prior(of)
    mean = start.mean.clone().requires_grad_()
    rho = (start.variance.log() / 2).requires_grad_()

    eps = Noise(members.streams("noise")).fill(torch.empty(1, len(mean), dtype=DOUBLE))[0]
    outputs = of.forward((mean + rho.exp() * eps)[None], members.x)[0]
    n = members.sizes[0]
    nll = of.likelihood.nll(outputs, members.y[0]).sum()
    objective = nll + 0.7 * Gaussian(mean, (2 * rho).exp()).kl(prior)
    (objective / n).backward()

    whole = fitted.posterior.join(Gaussian.unpack(fitted.memory, "personal."), of.layout)
    torch.testing.assert_close(whole.mean[0], (mean - 0.1 * mean.grad).detach())
    torch.testing.assert_close(whole.variance[0], (2 * (rho - 0.1 * rho.grad)).exp().detach())


def test_the_transmitted_copy_takes_the_step_of_eq_11():
    of = problem(sizes=(9,), sharing="body")
    plain = ReinforcedVariational(estimator="reparameterisation", **STEP)
    q, _ = fit(plain, of)
    v, _ = fit(attrs.evolve(plain, reinforce_steps=1, reinforce_lr=0.001), of)
    prior = first_broadcast(plain, of).prior
    mean = prior.mean.clone().requires_grad_()
    rho = (prior.variance.log() / 2).requires_grad_()
    q.posterior[0].kl(Gaussian(mean, (2 * rho).exp())).backward()
    torch.testing.assert_close(v.posterior.mean[0], (mean - 0.001 * mean.grad).detach())
    expected = (2 * (rho - 0.001 * rho.grad)).exp().detach()
    torch.testing.assert_close(v.posterior.variance[0], expected)
    for name in q.memory:  # under a common prior of the heads, each client keeps its posterior
        torch.testing.assert_close(v.memory[name], q.memory[name])


@pytest.mark.parametrize("copy_steps", [1, 2])
def test_a_round_with_copies_of_body_and_head_is_algorithm_1_by_hand(copy_steps):
    of = problem(sizes=(9,), sharing="body")
    inference = ReinforcedVariational(
        estimator="reparameterisation", optimiser="sgd", lr=0.05, local_epochs=2, batch_size=4,
        kl_weight=0.7, personal_prior="previous", reinforce_steps=copy_steps, reinforce_lr=0.002,
    )  # fmt: skip
    own = Gaussian(0.3 * normal(1, of.layout.personal_total, seed=8),
                   0.01 * normal(1, of.layout.personal_total, seed=9).exp())  # fmt: skip
    members = attrs.evolve(cohort(of, inference), memory=own.pack("personal."))
    broadcast = first_broadcast(inference, of)
    found = inference.fit(of, broadcast, members)

    start, pi = broadcast.start.join(own[0], of.layout), broadcast.prior.join(own[0], of.layout)
    q, v = (
        [one.mean.clone().requires_grad_(), (one.variance.log() / 2).requires_grad_()]
        for one in (start, pi)
    )

    def divergence(q, v):
        return Gaussian(q[0], (2 * q[1]).exp()).kl(Gaussian(v[0], (2 * v[1]).exp()))

    def descend(parameters, objective, lr):
        gradients = torch.autograd.grad(objective, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= lr * gradient

    noise = Noise(members.streams("noise"))
    for batch in batches(inference, members):
        eps = noise.fill(torch.empty(1, of.layout.total, dtype=DOUBLE))[0]
        outputs = of.forward((q[0] + q[1].exp() * eps)[None], batch.x)[0]
        nll = of.likelihood.nll(outputs, batch.y[0]).mean()  # eq. 10 over n
        descend(q, nll + 0.7 / 9 * divergence(q, v), 0.05)
        for _ in range(copy_steps):
            descend(v, divergence(q, v), 0.002)  # eq. 11
    zeta, eta = Gaussian(v[0].detach(), (2 * v[1]).exp().detach()).split(of.layout)
    kept = Gaussian.unpack(found.memory, "personal.")
    for ours, expected in ((found.posterior[0], zeta), (kept[0], eta)):
        torch.testing.assert_close(ours.mean, expected.mean)
        torch.testing.assert_close(ours.variance, expected.variance)
    assert not torch.equal(kept.mean, own.mean)


def test_the_rate_of_the_copy_falls_as_that_of_the_posterior():
    of = problem(sizes=(9,))
    inference = ReinforcedVariational(
        reinforce_steps=1, reinforce_lr=0.004, lr_decay=0.5, kl_weight=0, **STEP
    )
    broadcast = first_broadcast(inference, of, round=2)
    start = broadcast.start.mean
    q = attrs.evolve(inference, reinforce_steps=0).fit(
        of, broadcast, cohort(of, inference, round=2)
    )
    v = inference.fit(of, broadcast, cohort(of, inference, round=2))
    gradient = (start - q.posterior.mean[0]) / broadcast.prior.variance
    torch.testing.assert_close(v.posterior.mean[0], start - 0.004 * 0.25 * gradient)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_cohort_computes_what_its_clients_compute_alone(steps):
    of = problem(sharing="body")
    inference = ReinforcedVariational(local_epochs=3, batch_size=3, reinforce_steps=steps, lr=0.01)
    together, _ = fit(inference, of)
    for row, client in enumerate(together.clients):
        alone = inference.fit(of, first_broadcast(inference, of), cohort(of, inference, [client]))
        for name, tensor in alone.posterior.pack().items():
            torch.testing.assert_close(
                together.posterior.pack()[name][row], tensor[0], rtol=1e-9, atol=1e-9
            )


def test_the_personal_prior_is_the_clients_own_last_posterior():
    of = problem(sizes=(9,), sharing="body")
    inference = ReinforcedVariational(personal_prior="previous", kl_weight=1e9, **STEP)
    own = Gaussian(
        torch.full((1, of.layout.personal_total), 0.3, dtype=DOUBLE),
        torch.full((1, of.layout.personal_total), 0.04, dtype=DOUBLE),
    )
    members = attrs.evolve(cohort(of, inference), memory=own.pack("personal."))
    broadcast = first_broadcast(inference, of)
    prior = prior_of_cohort(inference, of, broadcast, members)
    assert torch.equal(prior.split(of.layout)[1].mean, own.mean)
    initial = attrs.evolve(inference, personal_prior="initial")
    other = prior_of_cohort(initial, of, broadcast, members)
    assert not torch.equal(other.split(of.layout)[1].mean, own.mean)


@pytest.mark.parametrize("sharing", ["body", "head"])
def test_without_uncertainty_it_is_fedper_and_lg_fedavg(sharing):
    """sigma -> 0 and no KL leave the point estimates of `map` under the same sharing."""
    of = problem(sharing=sharing)
    options = {"local_epochs": 2, "batch_size": 4, "lr": 0.05, "optimiser": "sgd"}
    certain = ReinforcedVariational(
        estimator="reparameterisation", initial_sigma=1e-7, kl_weight=0, **options
    )
    means = []
    for inference in (certain, Map(**options)):
        recipe = Recipe(inference, Average(), Equal(), Continual())
        broadcast = begin(recipe, of)
        with Local(workers=1).open(of, inference, 10) as session:
            for _ in range(3):
                broadcast = run_round(recipe, session, broadcast, of.clients).broadcast
        means.append(broadcast.start.mean)
    torch.testing.assert_close(means[0], means[1], rtol=1e-5, atol=1e-5)


def test_averaging_on_std_reproduces_algorithm_1():
    q = Gaussian(torch.zeros(2, 1), torch.tensor([[0.04], [0.16]]))
    prior = Gaussian(torch.zeros(1), torch.ones(1))
    fused = Average(on="std").fuse(q, torch.ones(2), prior)
    assert float(fused.variance.sqrt()) == pytest.approx(0.3)


def test_a_novel_client_learns_its_head_alone():
    of = problem(sizes=(9, 9), sharing="body", novel=(1,))
    inference = ReinforcedVariational(local_epochs=20, lr=0.05)
    members = cohort(of, inference, [1])
    memory = inference.personalise(of, first_broadcast(inference, of), members)
    assert not torch.equal(memory["personal.mean"], members.memory["personal.mean"])
    known = attrs.evolve(members, novel=False)
    assert inference.personalise(of, first_broadcast(inference, of), known) is members.memory


def test_the_prior_of_a_round_is_the_last_rounds_result():
    of = problem(sharing="body")
    inference = ReinforcedVariational(local_epochs=1)
    recipe = Recipe(inference, Average(), Equal(), Continual())
    with Local(workers=1).open(of, inference, 10) as session:
        following: Broadcast = run_round(recipe, session, begin(recipe, of), of.clients).broadcast
    assert following.prior is following.start


COMMON = {"personal_prior": "common", "local_epochs": 2, "batch_size": 4, "lr": 0.02}


def round_after_round(of, inference, hyper, rounds, aggregator=None):
    """Run rounds; yield the round, and the memories that clients keep after it."""
    recipe = Recipe(inference, aggregator or Average(), Equal(), hyper)
    broadcast = begin(recipe, of)
    with Local(workers=1).open(of, inference, 10) as session:
        for _ in range(rounds):
            done = run_round(recipe, session, broadcast, of.clients)
            broadcast = done.broadcast
            yield done, dict(session.memories)


@pytest.mark.parametrize("hyper", [Continual(), EmpiricalBayes(), Fixed()], ids=lambda h: h.name)
@pytest.mark.parametrize("copy_steps", [0, 1])
def test_the_common_prior_of_heads_is_the_linear_pool_of_the_last_round(hyper, copy_steps):
    of = problem(sharing="body")
    inference = ReinforcedVariational(reinforce_steps=copy_steps, **COMMON)
    plain = attrs.evolve(inference, personal_prior="initial")
    (expected, _), *_ = round_after_round(of, plain, hyper, 1)
    rounds = list(round_after_round(of, inference, hyper, 2))
    (first, kept), (second, _) = rounds
    assert first.dropped == second.dropped == ()
    means, variances = (
        torch.stack([memory[f"personal.{name}"] for memory in kept.values()])
        for name in ("mean", "variance")
    )
    prior = prior_of_cohort(inference, of, first.broadcast, cohort(of, inference))
    head = prior.split(of.layout)[1]
    for row in range(3):
        torch.testing.assert_close(head.mean[row], means.mean(0))
        pooled = (variances + (means - means.mean(0)).square()).mean(0)
        torch.testing.assert_close(head.variance[row], pooled)
    # The first round has the first prior, and what travels besides are the heads' moments.
    torch.testing.assert_close(first.broadcast.start.mean, expected.broadcast.start.mean)
    heads = 3 * 2 * of.layout.personal_total * 8
    assert first.bytes_up == expected.bytes_up + heads


def test_a_common_prior_pulls_the_heads_together():
    of = problem(sharing="body")
    spreads = {}
    for personal_prior in ("previous", "common"):
        options = COMMON | {"personal_prior": personal_prior, "kl_weight": 20.0, "local_epochs": 20}
        inference = ReinforcedVariational(**options)
        *_, (_, kept) = round_after_round(of, inference, Continual(), 6)
        means = torch.stack([memory["personal.mean"] for memory in kept.values()])
        spreads[personal_prior] = float(means.var(0).sum())
    assert spreads["common"] < 0.9 * spreads["previous"]


def test_a_hyper_update_that_does_not_pool_heads_is_named():
    of = problem(sharing="body")
    with pytest.raises(RoundError, match="inference.personal_prior: common .* allowed: --hyper"):
        list(round_after_round(of, ReinforcedVariational(**COMMON), Accumulate(), 2))


def test_without_personal_parameters_nothing_is_sent_and_nothing_is_pooled():
    of = problem(sharing="all")
    (done, _), (last, _) = round_after_round(of, ReinforcedVariational(**COMMON), Continual(), 2)
    assert not done.broadcast.hyper
    assert last.dropped == ()
