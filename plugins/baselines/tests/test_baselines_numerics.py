"""The methods' own steps against their equations, walked by hand; and the noise of the chain."""

import attrs
import torch

from bfl_baselines.apfl import AdaptiveMixture
from bfl_baselines.ditto import PulledNetwork
from bfl_baselines.fedpop import Langevin
from bfl_baselines.group_snip import GroupSnip
from bfl_baselines.group_sparse import GroupSparse
from bfl_baselines.groups import Groups
from bfl_baselines.pfedbayes import PersonalBayes
from bfl_baselines.pfedme import MoreauEnvelope
from bfl_baselines.pooled import Pooled
from bfl_baselines.scaffold import ControlVariates
from bfl_baselines.staged import Staged
from bflcore import Accumulate, LocalResult, Map
from bflcore.testing.problems import cohort, first_broadcast, problem

STEP = {"local_epochs": 1, "batch_size": 100, "optimiser": "sgd", "lr": 0.1}


def gradient(of, weights, client=0):
    x, y = of.train.of(client)
    leaf = weights.clone().requires_grad_()
    of.likelihood.nll(of.forward(leaf[None], x[None])[0], y).mean().backward()
    return leaf.grad


def fit(inference, of, memory=None, broadcast=None, clients=None) -> LocalResult:
    members = cohort(of, inference, clients)
    if memory is not None:
        members = attrs.evolve(members, memory={**members.memory, **memory})
    return inference.fit(of, broadcast or first_broadcast(inference, of), members)


def own(of, seed=5):
    v = torch.randn(of.initial.shape, generator=torch.Generator().manual_seed(seed)).double()
    return v, {"own.mean": v[None], "started": torch.ones(1).double()}


def test_dittos_own_network_takes_the_pulled_step():
    of = problem(sizes=(9,))
    v, memory = own(of)
    result = fit(PulledNetwork(pull=0.4, **STEP), of, memory)
    expected = v - 0.1 * (gradient(of, v) + 0.4 * (v - of.initial))
    torch.testing.assert_close(result.memory["own.mean"][0], expected)


def test_apfl_takes_the_chain_rule_and_adapts_alpha():
    of = problem(sizes=(9,))
    v, memory = own(of)
    inference = AdaptiveMixture(alpha=0.3, **STEP)
    result = fit(inference, of, {**memory, "v": v[None]})
    w = of.initial
    slope = gradient(of, 0.3 * v + 0.7 * w)
    alpha = float((0.3 - 0.1 * (slope @ (v - w))).clamp(0, 1))
    torch.testing.assert_close(float(result.memory["alpha"]), alpha)
    expected = v - 0.1 * alpha * slope
    torch.testing.assert_close(result.memory["v"][0], expected)
    mixed = alpha * expected + (1 - alpha) * (w - 0.1 * gradient(of, w))
    torch.testing.assert_close(result.memory["own.mean"][0], mixed)


def test_pfedme_descends_the_moreau_envelope():
    of = problem(sizes=(9,))
    inference = MoreauEnvelope(pull=3.0, inner_steps=2, personal_lr=0.05, **STEP)
    result = fit(inference, of)
    w = theta = of.initial
    for _ in range(2):
        theta = theta - 0.05 * (gradient(of, theta) + 3 * (theta - w))
    torch.testing.assert_close(result.memory["own.mean"][0], theta)
    torch.testing.assert_close(result.posterior.mean[0], w - 0.1 * 3 * (w - theta))


def test_scaffolds_new_control_is_the_mean_gradient_of_the_round():
    of = problem(sizes=(9, 9))
    options = {"local_epochs": 1, "batch_size": 100, "lr": 0.1}
    inference = ControlVariates(**options)
    first = fit(inference, of)
    for client in (0, 1):
        expected = gradient(of, of.initial, client)
        torch.testing.assert_close(first.memory["control"][client], expected)
        torch.testing.assert_close(first.statistics["control"][client], expected / 2)
    hyper, begun = Accumulate(), first_broadcast(inference, of)
    total = hyper.summarise(first, torch.ones(2), begun)
    following = hyper.update(begun, first.posterior[0], total)
    mean = first.memory["control"].mean(0)
    torch.testing.assert_close(following.hyper["control"], mean)
    second = inference.fit(
        of, following, attrs.evolve(cohort(of, inference), memory=first.memory)
    )  # g + c - c_i, then c_i+ is the plain gradient again
    start = following.start.mean
    expected = start - 0.1 * (gradient(of, start) + mean - first.memory["control"][0])
    torch.testing.assert_close(second.posterior.mean[0], expected)
    torch.testing.assert_close(second.memory["control"][0], gradient(of, start))


def test_fedrep_and_fedbabu_move_what_they_say():
    of = problem(sizes=(9,), sharing="body")
    body, head = of.layout.split(of.initial)
    babu = fit(Staged(stages="shared", **STEP), of)
    assert torch.equal(babu.memory["personal.mean"][0], head)
    assert not torch.equal(babu.posterior.mean[0], body)
    rep = fit(Staged(stages="personal-then-shared", personal_epochs=1, **STEP), of)
    moved = head - 0.1 * of.layout.split(gradient(of, of.initial))[1]
    torch.testing.assert_close(rep.memory["personal.mean"][0], moved)
    slope = of.layout.split(gradient(of, of.layout.join(body, moved)))[0]
    torch.testing.assert_close(rep.posterior.mean[0], body - 0.1 * slope)


def test_fine_tuning_is_what_predicts_and_does_not_travel():
    of = problem(sizes=(9,))
    inference = Staged(fine_tune_epochs=1, **STEP)
    begun, members = first_broadcast(inference, of), cohort(of, inference)
    memory = inference.personalise(of, begun, members)
    expected = of.initial - 0.1 * gradient(of, of.initial)
    torch.testing.assert_close(memory["own.mean"][0], expected)
    x = members.x[:, :4]
    tuned = attrs.evolve(members, memory=memory)
    found = inference.predict(of, begun, tuned, x).draws[0, 0]
    torch.testing.assert_close(found, of.forward(expected[None], x)[0].softmax(-1))


def test_group_lasso_is_the_gradient_of_the_sum_of_norms():
    of = problem(sizes=(9,))
    inference = GroupSparse(group_lasso=0.2, energy=1.0, **STEP)
    result = fit(inference, of)
    leaf = of.initial.clone().requires_grad_()
    matrices = [m for m in of.layout.unflatten(leaf).values() if m.ndim == 2]
    penalty = sum(m.shape[0] ** 0.5 * m.norm(dim=0).sum() for m in matrices)
    (slope,) = torch.autograd.grad(0.2 * penalty, leaf)
    expected = of.initial - 0.1 * (gradient(of, of.initial) + slope)
    torch.testing.assert_close(result.posterior.mean[0], expected)


def test_pruning_keeps_the_share_of_energy_and_whole_groups():
    of = problem(sizes=(9,))
    full = fit(GroupSparse(energy=1.0, **STEP), of).posterior.mean
    pruned = fit(GroupSparse(energy=0.9, **STEP), of).posterior.mean
    groups = Groups(of.layout)
    before, after = groups.sums(full.square()), groups.sums(pruned.square())
    gone = after == 0
    assert 0 < int(gone.sum()) < groups.count
    assert torch.equal(after[~gone], before[~gone])
    assert float(after.sum() / before.sum()) >= 0.9


def test_snip_prunes_the_groups_with_the_least_sensitivity():
    of = problem(sizes=(9,))
    result = fit(GroupSnip(pruned=0.4, **STEP), of)
    products = of.layout.unflatten(of.initial * gradient(of, of.initial))
    scores = torch.cat([m.sum(0).abs() for m in products.values() if m.ndim == 2])
    weights = of.layout.unflatten(result.posterior.mean[0])
    zero = torch.cat([(m == 0).all(0) for m in weights.values() if m.ndim == 2])
    count = int(0.4 * len(scores))
    assert set(zero.nonzero()[:, 0].tolist()) == set(scores.argsort()[:count].tolist())


def test_the_chain_samples_a_known_posterior():
    """Where the data says nothing of the head's weights, they follow their prior: real noise.

    A step of h leaves the prior's variance sigma^2 / (1 - h / (2 sigma^2)).
    """
    of = problem(sizes=(1,) * 4, sharing="body")
    of = attrs.evolve(of, initial=torch.zeros_like(of.initial))  # the body says 0 to anything
    inference = Langevin(
        prior_sigma=0.05, langevin_lr=5e-4, particles=80, inner_steps=10, local_epochs=100,
        batch_size=1, lr=1e-12,
    )  # fmt: skip
    centre = torch.full_like(of.layout.split(of.initial)[1], 0.3)
    broadcast = attrs.evolve(first_broadcast(inference, of), hyper={"centre": centre})
    draws = fit(inference, of, broadcast=broadcast).memory["personal.draws"]
    weights = draws[..., :8]  # those of the head's inputs
    torch.testing.assert_close(
        float(weights.std()), 0.05 / (1 - 5e-4 / (2 * 0.05**2)) ** 0.5, rtol=0.06, atol=0
    )
    assert abs(float(weights.mean()) - 0.3) < 0.005


def test_the_body_descends_the_gradient_under_the_chain():
    of = problem(sizes=(9,), sharing="body")
    result = fit(Langevin(inner_steps=1, burn_in=0.0, particles=1, **STEP), of)
    body = of.layout.split(of.initial - 0.1 * gradient(of, of.initial))[0]
    torch.testing.assert_close(result.posterior.draws[0, 0], body)


def test_the_chains_common_prior_follows_the_mean_of_all_particles():
    of = problem(sizes=(7, 5, 2), sharing="body")
    inference, hyper = Langevin(local_epochs=2, particles=3), Accumulate()
    broadcast, memory = first_broadcast(inference, of), None
    for _ in range(2):
        result = fit(inference, of, memory, broadcast)
        total = hyper.summarise(result, torch.ones(3), broadcast)
        broadcast, memory = hyper.update(broadcast, result.posterior[0], total), result.memory
        expected = result.memory["personal.draws"].mean((0, 1))
        torch.testing.assert_close(broadcast.hyper["centre"], expected)


def test_pfedbayes_keeps_q_and_sends_what_follows_it():
    of = problem(sizes=(9,))
    inference = PersonalBayes(**STEP)
    result = fit(inference, of)
    q, w = result.memory["own.mean"][0], result.posterior.mean[0]
    assert not torch.equal(q, w)
    start = inference.initial(of).mean
    assert float((w - start).norm()) < float((q - start).norm())  # it follows, and lags


def test_pooled_training_is_that_of_one_client_with_everything():
    of = problem(sizes=(7, 5, 2))
    options = {**STEP, "local_epochs": 1}
    result = fit(Pooled(**options), of)
    one = problem(sizes=(14,))
    expected = fit(Map(**options), one).posterior.mean[0]
    for row in range(3):
        torch.testing.assert_close(result.posterior.mean[row], expected)
