"""The methods' own steps against their equations, walked by hand; and the noise of the chain."""

import attrs
import torch
from torch.distributions import Normal, kl_divergence

from bfl_baselines.apfl import AdaptiveMixture
from bfl_baselines.ditto import PulledNetwork
from bfl_baselines.fedpop import Langevin
from bfl_baselines.group_snip import GroupSnip
from bfl_baselines.group_sparse import GroupSparse
from bfl_baselines.pfedbayes import PersonalBayes
from bfl_baselines.pfedme import MoreauEnvelope
from bfl_baselines.pooled import Pooled
from bfl_baselines.scaffold import ControlVariates
from bfl_baselines.staged import Staged
from bflcore import Accumulate, Average, Categorical, Equal, Fixed, LocalResult, Map
from bflcore.engines.local import Local
from bflcore.inference.normals import Noise
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import cohort, first_broadcast, problem, surveyed

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
    inference = AdaptiveMixture(alpha=0.3, alpha_lr=0.02, **STEP)
    result = fit(inference, of, {**memory, "v": v[None]})
    w = of.initial
    slope = gradient(of, 0.3 * v + 0.7 * w)
    alpha = float((0.3 - 0.02 * (slope @ (v - w))).clamp(0, 1))
    torch.testing.assert_close(float(result.memory["alpha"]), alpha)
    expected = v - 0.1 * alpha * slope
    torch.testing.assert_close(result.memory["v"][0], expected)
    mixed = alpha * expected + (1 - alpha) * (w - 0.1 * gradient(of, w))
    torch.testing.assert_close(result.memory["own.mean"][0], mixed)


def test_apfls_alpha_moves_under_its_defaults():
    of = problem(sizes=(40, 40, 40))
    recipe = Recipe(AdaptiveMixture(), Average(), Equal(), Fixed())
    broadcast = begin(recipe, of)
    with Local(workers=1).open(of, recipe.inference, 10) as session:
        for _ in range(10):
            broadcast = run_round(recipe, session, broadcast, of.clients).broadcast
        alphas = [float(memory["alpha"]) for memory in session.memories.values()]
    assert all(abs(alpha - 0.5) > 0.005 for alpha in alphas), alphas  # at lr = 1e-3: 2e-4


def test_pfedme_descends_the_moreau_envelope():
    of = problem(sizes=(9,))
    inference = MoreauEnvelope(pull=3.0, inner_steps=2, personal_lr=0.05, **STEP)
    result = fit(inference, of)
    w = theta = of.initial
    for _ in range(2):
        theta = theta - 0.05 * (gradient(of, theta) + 3 * (theta - w))
    torch.testing.assert_close(result.memory["own.mean"][0], theta)
    torch.testing.assert_close(result.posterior.mean[0], w - 0.1 * 3 * (w - theta))


def test_pfedmes_theta_starts_a_round_at_w_and_a_minibatch_where_the_last_one_left_it():
    of = problem(sizes=(9,))
    inference = MoreauEnvelope(
        pull=3.0, inner_steps=2, personal_lr=0.05, **{**STEP, "local_epochs": 3}
    )
    _, memory = own(of)  # theta of the previous round: not where this one starts
    result = fit(inference, of, memory)
    w = theta = of.initial
    for _ in range(3):
        for _ in range(2):
            theta = theta - 0.05 * (gradient(of, theta) + 3 * (theta - w))
        w = w - 0.1 * 3 * (w - theta)
    torch.testing.assert_close(result.memory["own.mean"][0], theta)
    torch.testing.assert_close(result.posterior.mean[0], w)


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


def test_fedreps_head_trains_for_its_own_number_of_epochs_and_the_body_for_one():
    of = problem(sizes=(9,), sharing="body")
    fedrep = load_registry().methods["fedrep"].inference
    assert (fedrep.personal_epochs, fedrep.local_epochs) == (10, 1)
    result = fit(fedrep.replace(optimiser="sgd", lr=0.1, batch_size=100), of)
    body, head = of.layout.split(of.initial)
    for _ in range(10):
        head = head - 0.1 * of.layout.split(gradient(of, of.layout.join(body, head)))[1]
    body = body - 0.1 * of.layout.split(gradient(of, of.layout.join(body, head)))[0]
    torch.testing.assert_close(result.memory["personal.mean"][0], head)
    torch.testing.assert_close(result.posterior.mean[0], body)


def test_novel_clients_train_the_head_as_long_as_others_and_not_at_all_in_fedbabu():
    of = problem(sizes=(9, 9), sharing="body", novel=(1,))
    head = of.layout.split(of.initial)[1]
    for stages, epochs in (("personal-then-shared", 4), ("joint", 1), ("shared", 0)):
        inference = Staged(stages=stages, personal_epochs=4, **STEP)
        members = cohort(of, inference, [1])
        memory = inference.personalise(of, first_broadcast(inference, of), members)
        expected = of.initial
        for _ in range(epochs):
            moved = of.layout.split(expected - 0.1 * gradient(of, expected, client=1))[1]
            expected = of.layout.join(of.layout.split(expected)[0], moved)
        found = memory["personal.mean"][0]
        torch.testing.assert_close(found, of.layout.split(expected)[1])
        assert torch.equal(found, head) == (stages == "shared")


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
    inference = GroupSparse(group_lasso=0.2, **STEP)
    result = fit(inference, of)
    leaf = of.initial.clone().requires_grad_()
    matrices = [m for m in of.layout.unflatten(leaf).values() if m.ndim == 2]
    penalty = sum(m.shape[0] ** 0.5 * m.norm(dim=0).sum() for m in matrices)
    (slope,) = torch.autograd.grad(0.2 * penalty, leaf)
    expected = of.initial - 0.1 * (gradient(of, of.initial) + slope)
    torch.testing.assert_close(result.posterior.mean[0], expected)


def zero_groups(of, weights):
    """Return the columns of weight matrices that are zero, in order of the matrices."""
    matrices = [m for m in of.layout.unflatten(weights).values() if m.ndim == 2]
    return torch.cat([(m == 0).all(0) for m in matrices])


def rounds_of(inference, of, hyper, rounds):
    """Yield every broadcast, and the clients' networks after its round."""
    broadcast = first_broadcast(inference, of)
    for number in range(rounds):
        result = inference.fit(of, broadcast, cohort(of, inference, round=number))
        yield broadcast, result
        mean = type(result.posterior)(result.posterior.mean.mean(0))
        total = hyper.summarise(result, torch.ones(len(result.clients)), broadcast)
        broadcast = hyper.update(broadcast, mean, total)


def test_group_sparse_prunes_once_to_the_target_and_the_same_groups_everywhere():
    of = attrs.evolve(problem(sizes=(7, 5, 2)), rounds=6)
    inference = GroupSparse(target=0.4, prune_after=0.34, group_lasso=0.01, **STEP)  # 2 rounds
    pruned = []
    for number, (broadcast, result) in enumerate(rounds_of(inference, of, Fixed(), 6), start=1):
        zero = [zero_groups(of, weights) for weights in result.posterior.mean]
        if number < 3:
            assert not any(bool(groups.any()) for groups in zero)
            continue
        if number == 3:
            matrices = [
                m for m in of.layout.unflatten(broadcast.start.mean).values() if m.ndim == 2
            ]
            size = torch.cat([m.square().mean(0) for m in matrices])
            smallest = set(size.argsort()[: round(0.6 * len(size))].tolist())
        pruned += [set(groups.nonzero()[:, 0].tolist()) for groups in zero]
        assert not torch.equal(result.posterior.mean[0], broadcast.start.mean)  # it trains on
    assert pruned == [smallest] * 12  # at 3 clients in 4 rounds


def test_the_effect_of_a_group_is_the_variance_of_what_it_adds_on_the_pooled_samples():
    of = attrs.evolve(problem(sizes=(7, 5, 2)), rounds=6)
    inference = GroupSparse(target=0.4, prune_after=0.34, score="effect", **STEP)  # 2 rounds
    pruned = []
    for number, (broadcast, result) in enumerate(rounds_of(inference, of, Accumulate(), 6)):
        assert bool(result.statistics) == (number == 1)  # sent once, in the round before
        if number == 1:
            before = broadcast.start.mean
        if number == 2:
            scores = []
            with torch.no_grad():
                u = torch.cat([of.train.of(client)[0] for client in range(3)]).flatten(1)
                early, late = (
                    [m for m in of.layout.unflatten(w).values() if m.ndim == 2]
                    for w in (before, broadcast.start.mean)
                )
                bias = [b for b in of.layout.unflatten(before).values() if b.ndim == 1]
                for layer, (w, now) in enumerate(zip(early, late, strict=True)):
                    added = (u[:, None, :] * now).var(0, correction=0).sum(0)  # [N]
                    scores.append(added)
                    u = (u @ w.T + bias[layer]).tanh()
            scores = torch.cat(scores)
            least = set(scores.argsort(stable=True)[: round(0.6 * len(scores))].tolist())
        if number >= 2:
            zero = [zero_groups(of, weights) for weights in result.posterior.mean]
            pruned += [set(groups.nonzero()[:, 0].tolist()) for groups in zero]
    assert pruned == [least] * 12  # at 3 clients in 4 rounds


def test_pruning_by_layer_takes_the_same_fraction_of_each():
    of = attrs.evolve(problem(sizes=(7, 5, 2)), rounds=4)
    options = {"target": 0.5, "prune_after": 0.25, "by_layer": True, "score": "effect"}
    *_, (_, result) = rounds_of(GroupSparse(**options, **STEP), of, Accumulate(), 4)
    tensors = of.layout.unflatten(result.posterior.mean[0]).values()
    for m in (m for m in tensors if m.ndim == 2):
        assert abs(int((m == 0).all(0).sum()) - m.shape[1] / 2) <= 1


def test_a_target_of_all_groups_prunes_nothing():
    of = problem(sizes=(7, 5, 2))
    for _, result in rounds_of(GroupSparse(target=1.0, prune_after=0.0, **STEP), of, Fixed(), 4):
        assert not any(bool(zero_groups(of, w).any()) for w in result.posterior.mean)


def test_snip_trains_nothing_in_round_1_and_has_one_mask_from_then_on():
    of, one = problem(sizes=(7, 5, 2)), problem(sizes=(14,))  # the same samples
    products = of.layout.unflatten(of.initial * gradient(one, of.initial))
    scores = torch.cat([m.sum(0).abs() for m in products.values() if m.ndim == 2])
    least = set(scores.argsort()[: int(0.4 * len(scores))].tolist())
    inference, pruned = GroupSnip(pruned=0.4, **STEP), []
    for number, (broadcast, result) in enumerate(rounds_of(inference, of, Accumulate(), 4)):
        if not number:
            assert torch.equal(result.posterior.mean, of.initial.expand(3, -1))
            continue
        zero = [zero_groups(of, weights) for weights in result.posterior.mean]
        pruned += [set(groups.nonzero()[:, 0].tolist()) for groups in zero]
        assert not torch.equal(result.posterior.mean[0], broadcast.start.mean)
    assert pruned == [least] * 9  # of the pooled samples, at 3 clients in 3 rounds


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
    spread = centre.new_tensor(0.09)  # E z^2 - prior_sigma^2: sigma is what it was
    broadcast = attrs.evolve(
        first_broadcast(inference, of), hyper={"centre": centre, "spread": spread}
    )
    draws = fit(inference, of, broadcast=broadcast).memory["personal.draws"]
    weights = draws[..., :8]  # those of the head's inputs
    torch.testing.assert_close(
        float(weights.std()), 0.05 / (1 - 5e-4 / (2 * 0.05**2)) ** 0.5, rtol=0.06, atol=0
    )
    assert abs(float(weights.mean()) - 0.3) < 0.005


def test_an_epoch_is_langevin_steps_and_then_steps_of_the_body_on_all_samples():
    of = problem(sizes=(9,), sharing="body")
    options = {**STEP, "local_epochs": 2, "batch_size": 4}  # what batches there are is irrelevant
    inference = Langevin(inner_steps=4, burn_in=0.5, particles=3, langevin_lr=0.2, **options)
    members, (body, z) = cohort(of, inference), of.layout.split(of.initial)
    xi = Noise(members.streams("langevin"))
    states = []
    for _ in range(2):
        for _ in range(4):
            of_head = of.layout.split(gradient(of, of.layout.join(body, z)))[1]
            noise = xi.fill(torch.empty_like(z)[None])[0]
            z = z - 0.2 * (of_head + z / (9 * 0.1**2)) + (2 * 0.2 / 9) ** 0.5 * noise
            states.append(z)
        for _ in range(2):  # as many as draws, and down their mean gradient
            slopes = [gradient(of, of.layout.join(body, draw)) for draw in states[-2:]]
            body = body - 0.1 * of.layout.split(sum(slopes) / 2)[0]
    result = fit(inference, of)
    torch.testing.assert_close(result.posterior.draws[0, 0], body)
    expected = torch.stack([states[3], states[6], states[7]])  # of the draws 2, 3, 6 and 7
    torch.testing.assert_close(result.memory["personal.draws"][0], expected)


def test_the_m_step_is_the_mean_and_variance_of_all_particles_and_the_next_prior():
    of = problem(sizes=(7, 5, 2), sharing="body")
    inference, hyper = Langevin(local_epochs=2, particles=3), Accumulate()
    broadcast, memory = first_broadcast(inference, of), None
    for _ in range(3):
        result = fit(inference, of, memory, broadcast)
        total = hyper.summarise(result, torch.ones(3), broadcast)
        broadcast, memory = hyper.update(broadcast, result.posterior[0], total), result.memory
        draws = result.memory["personal.draws"]
        mean = draws.mean((0, 1))
        torch.testing.assert_close(broadcast.hyper["centre"], mean)
        variance = 0.1**2 + broadcast.hyper["spread"] - mean.square().mean()
        torch.testing.assert_close(variance, (draws - mean).square().mean())


def test_the_chain_follows_the_learned_scale():
    """As for the known posterior above: the likelihood does not depend on the head's weights."""
    of = problem(sizes=(1,) * 4, sharing="body")
    of = attrs.evolve(of, initial=torch.zeros_like(of.initial))
    inference = Langevin(
        prior_sigma=1.0, langevin_lr=5e-4, particles=400, local_epochs=100, lr=1e-12
    )
    head = of.layout.split(of.initial)[1]
    hyper = {"centre": torch.zeros_like(head), "spread": head.new_tensor(0.05**2 - 1.0)}
    broadcast = attrs.evolve(first_broadcast(inference, of), hyper=hyper)
    weights = fit(inference, of, broadcast=broadcast).memory["personal.draws"][..., :8]
    expected = 0.05 / (1 - 5e-4 / (2 * 0.05**2)) ** 0.5
    torch.testing.assert_close(float(weights.std()), expected, rtol=0.06, atol=0)


def test_pfedbayes_takes_five_steps_of_the_q_it_kept_for_each_step_of_w():
    """By hand, with KLs by torch; sigma is so small that a draw is as good as the mean."""
    of, sigma = problem(sizes=(9,)), 1e-4
    inference = PersonalBayes(
        kl_weight=9e-9, initial_sigma=sigma, reinforce_lr=1e-9, **{**STEP, "local_epochs": 2}
    )
    mean, kept = own(of)
    kept = {**kept, "own.variance": torch.full_like(mean, 4 * sigma**2)[None]}
    result = fit(inference, of, kept)
    q = [mean, torch.full_like(mean, 2 * sigma).log()]
    w = [of.initial, torch.full_like(mean, sigma).log()]

    def divergence(q, w):
        return kl_divergence(*(Normal(m, rho.exp()) for m, rho in (q, w))).sum()

    for _ in range(2):
        for _ in range(5):
            leaves = [t.clone().requires_grad_() for t in q]
            slopes = torch.autograd.grad(1e-9 * divergence(leaves, w), leaves)
            q = [q[0] - 0.1 * (slopes[0] + gradient(of, q[0])), q[1] - 0.1 * slopes[1]]
        leaves = [t.clone().requires_grad_() for t in w]
        slopes = torch.autograd.grad(divergence(q, leaves), leaves)
        w = [w[0] - 1e-9 * slopes[0], w[1] - 1e-9 * slopes[1]]
    found = result.memory
    torch.testing.assert_close(found["own.mean"][0], q[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["own.variance"][0].log() / 2, q[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(result.posterior.mean[0], w[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(result.posterior.variance[0].log() / 2, w[1], rtol=1e-3, atol=0)


def test_pfedbayes_keeps_q_from_round_to_round():
    of = problem(sizes=(9,))
    inference = PersonalBayes(**STEP)
    first = fit(inference, of)
    second = fit(inference, of, dict(first.memory))  # from the same server's Gaussian
    assert not torch.equal(second.memory["own.mean"], first.memory["own.mean"])
    start = inference.initial(of).mean
    moved = float((first.posterior.mean[0] - start).norm())
    assert 0 < moved < float((first.memory["own.mean"][0] - start).norm())  # w follows, and lags


def test_pooled_training_is_that_of_one_client_with_everything():
    of = problem(sizes=(7, 5, 2))
    options = {**STEP, "local_epochs": 1}
    result = fit(Pooled(**options), of)
    one = problem(sizes=(14,))
    expected = fit(Map(**options), one).posterior.mean[0]
    for row in range(3):
        torch.testing.assert_close(result.posterior.mean[row], expected)


def test_pooled_training_has_the_label_prior_of_everything():
    of = problem(sizes=(7, 5, 2), likelihood=Categorical(label_prior=2.0))
    of = surveyed(Map(), of)
    bound = of.for_client(of.cohort([2], {}, 0))
    result = fit(Pooled(**STEP), bound, clients=[2])
    x, y = of.train.x, of.train.y
    counts = torch.bincount(y, minlength=2).double()
    base = (counts + 0.5) / (counts.sum() + 1)
    prior = ((counts + 2 * base) / (counts.sum() + 2)).log()
    leaf = of.initial.clone().requires_grad_()
    logits = torch.func.functional_call(of.network, of.layout.unflatten(leaf), (x,))
    torch.nn.functional.cross_entropy(logits + prior, y).backward()
    torch.testing.assert_close(result.posterior.mean[0], (of.initial - 0.1 * leaf.grad).detach())
