"""Minibatch training: batches, gradients and the optimiser."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from bflcore import Map
from bflcore.inference.gradient import (
    Gradient,
    Optimiser,
    batches,
    loss_per_client,
    steps,
    trainable_mask,
)
from bflcore.problem.likelihoods import Categorical, GaussianNoise
from bflcore.testing.problems import cohort, convolutional, dense, normal, problem

SIZES = (8, 7, 5, 2)


def numbered(sizes=SIZES):
    """Return a cohort whose sample i of client k is the number 100 k + i, and its problem."""
    of = problem(sizes=sizes, shape=(1,))
    members = cohort(of, Map())
    x = torch.full_like(members.x, -1.0)
    for row, client in enumerate(members.clients):
        size = members.sizes[row]
        x[row, :size, 0] = 100 * client + torch.arange(size, dtype=x.dtype)
    return of, attrs.evolve(members, x=x, y=x[:, :, 0].long())


def seen(members, inference):
    """Return, for each step, the samples of each client that took part in it."""
    return [
        [batch.x[row, :size, 0].int().tolist() for row, size in enumerate(batch.sizes)]
        for batch in batches(inference, members)
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8, 50])
def test_every_epoch_shows_every_sample_exactly_once(batch_size):
    _, members = numbered()
    inference = Map(local_epochs=3, batch_size=batch_size)
    steps = seen(members, inference)
    for row, (client, size) in enumerate(zip(members.clients, members.sizes, strict=True)):
        own = [sample for step in steps if row < len(step) for sample in step[row]]
        for epoch in range(3):
            shown = own[epoch * size : (epoch + 1) * size]
            assert sorted(shown) == [100 * client + i for i in range(size)]


def test_the_last_partial_batch_is_kept():
    _, members = numbered((8,))
    assert [len(step[0]) for step in seen(members, Map(local_epochs=2, batch_size=3))] == [
        *(3, 3, 2),
        *(3, 3, 2),
    ]


def test_a_client_smaller_than_a_batch_trains_on_all_its_samples():
    _, members = numbered((2,))
    (only,) = seen(members, Map(local_epochs=1, batch_size=50))
    assert sorted(only[0]) == [0, 1]


def test_targets_stay_with_their_samples():
    _, members = numbered()
    for batch in batches(Map(local_epochs=2, batch_size=3), members):
        for row, size in enumerate(batch.sizes):
            assert torch.equal(batch.x[row, :size, 0].long(), batch.y[row, :size])


@pytest.mark.parametrize("batch_size", [3, 50])
def test_padded_rows_weigh_nothing_and_real_ones_weigh_the_same(batch_size):
    _, members = numbered()
    for batch in batches(Map(local_epochs=1, batch_size=batch_size), members):
        if batch.weight is None:
            assert len(set(batch.sizes)) == 1
            continue
        for row, size in enumerate(batch.sizes):
            assert batch.weight[row, :size].tolist() == [1 / size] * size
            assert not batch.weight[row, size:].any()


def test_clients_leave_when_they_have_taken_their_steps():
    _, members = numbered()
    inference = Map(local_epochs=2, batch_size=3)
    taken = steps(inference, members)
    assert taken == (6, 6, 4, 2)
    active = [len(step) for step in seen(members, inference)]
    assert active == [sum(n > step for n in taken) for step in range(6)]


def test_the_batches_of_a_client_do_not_depend_on_its_company():
    _, members = numbered()
    inference = Map(local_epochs=2, batch_size=3)
    together = seen(members, inference)
    for row, client in enumerate(members.clients):
        single = attrs.evolve(
            members,
            clients=(client,),
            x=members.x[[row]],
            y=members.y[[row]],
            sizes=members.sizes[row : row + 1],
        )
        alone = [step[0] for step in seen(single, inference)]
        assert alone == [step[row] for step in together if row < len(step)]


def test_epochs_rounds_and_clients_are_shuffled_differently():
    _, members = numbered((8, 8))
    inference = Map(local_epochs=2, batch_size=8)
    first, second = seen(members, inference)
    (later, _) = seen(attrs.evolve(members, round=1), inference)
    orders = [first[0], second[0], later[0], [sample - 100 for sample in first[1]]]
    assert len({tuple(order) for order in orders}) == 4
    assert seen(members, inference) == [first, second]


@pytest.mark.parametrize("likelihood", [Categorical(), GaussianNoise()])
def test_the_loss_of_a_client_is_the_mean_over_its_own_samples(likelihood):
    of = problem(likelihood=likelihood)
    members = cohort(of, Map())
    for batch in batches(Map(local_epochs=1, batch_size=3), members):
        outputs = normal(*batch.y.shape[:2], 2)
        losses = loss_per_client(of, outputs, batch)
        for row, size in enumerate(batch.sizes):
            alone = likelihood.nll(outputs[row, :size], batch.y[row, :size]).mean()
            torch.testing.assert_close(losses[row], alone)


@pytest.mark.parametrize("network", [dense(), convolutional()], ids=["dense", "convolutional"])
@pytest.mark.parametrize("clients", [[0], [0, 1]])
def test_gradients_equal_those_of_a_network_in_a_plain_loop(network, clients):
    shape = (3,) if len(network) == 3 else (2, 4, 4)
    of = problem(network, shape=shape)
    members = cohort(of, Map(), clients)
    (batch,) = batches(Map(local_epochs=1, batch_size=50), members)
    weights = of.initial + 0.1 * normal(len(clients), of.layout.total)
    losses, gradients = Gradient(of)(weights, batch)
    for row, size in enumerate(batch.sizes):
        torch.nn.utils.vector_to_parameters(weights[row].clone(), of.network.parameters())
        outputs = of.network(batch.x[row, :size])
        loss = torch.nn.functional.cross_entropy(outputs, batch.y[row, :size])
        expected = torch.autograd.grad(loss, list(of.network.parameters()))
        torch.testing.assert_close(losses[row], loss.detach())
        torch.testing.assert_close(gradients[row], torch.cat([g.reshape(-1) for g in expected]))


def test_a_parameter_that_is_not_used_has_gradient_zero():
    class Idle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    of = problem(Idle(), sizes=(4,), head="used")
    (batch,) = batches(Map(local_epochs=1), cohort(of, Map()))
    _, gradient = Gradient(of)(of.initial[None], batch)
    assert gradient[0, :8].all()
    assert not gradient[0, 8:].any()


RULES = {
    "adam": (Map(lr=0.05, optimiser="adam"), lambda p: torch.optim.Adam([p], lr=0.05)),
    "sgd": (Map(lr=0.05, optimiser="sgd"), lambda p: torch.optim.SGD([p], lr=0.05)),
    "momentum": (
        Map(lr=0.05, optimiser="sgd", momentum=0.9),
        lambda p: torch.optim.SGD([p], lr=0.05, momentum=0.9),
    ),
}


@pytest.mark.parametrize(("inference", "make"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", [(9,), (2, 9)])
def test_the_optimiser_equals_torchs_own_run_for_each_client_alone(inference, make, shape):
    # Of 5, 3, 3 and 1 samples: with one sample per batch, as many steps.
    members = cohort(problem(sizes=(5, 3, 3, 1)), inference)
    inference = attrs.evolve(inference, local_epochs=1, batch_size=1)
    start = normal(4, *shape)
    together = start.clone()
    optimiser = inference.update_rule(together, members)
    expected = [row.clone() for row in start]
    rules = [make(parameter) for parameter in expected]
    for step in range(5):
        active = sum(n > step for n in members.sizes)
        gradient = normal(active, *shape, seed=10 + step)
        optimiser.step(gradient)
        for row in range(active):
            expected[row].grad = gradient[row].clone()
            rules[row].step()
        torch.testing.assert_close(together, torch.stack(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("rule", "momentum"), [("adam", 0.0), ("sgd", 0.0), ("sgd", 0.9)], ids=RULES
)
def test_a_client_with_fewer_steps_stands_still_afterwards(rule, momentum):
    parameters = normal(3, 9)
    optimiser = Optimiser(parameters, (4, 2, 2), rule, 0.05, momentum)
    for step in range(4):
        optimiser.step(normal(3 if step < 2 else 1, 9, seed=step))
        if step == 1:
            rested = parameters[1:].clone()
            moving = parameters[0].clone()
    assert torch.equal(parameters[1:], rested)
    assert not torch.equal(parameters[0], moving)


@pytest.mark.parametrize(("round", "expected"), [(0, 0.1), (3, 0.1), (4, 0.08), (6, 0.1 * 0.8**3)])
def test_the_learning_rate_falls_after_the_given_round(round, expected):
    inference = Map(lr=0.1, lr_decay=0.2, lr_decay_after=3, optimiser="sgd")
    parameters = torch.zeros(1, 4, dtype=torch.float64)
    members = cohort(problem(), inference, [0], round=round)
    inference.update_rule(parameters, members).step(torch.ones_like(parameters))
    np.testing.assert_allclose(parameters, -expected)


@pytest.mark.parametrize("sharing", ["all", "body", "head", "none"])
def test_a_mask_selects_the_personal_or_the_shared_parameters(sharing):
    of = problem(sharing=sharing)
    for trainable, shared_one in (("personal", 0.0), ("shared", 1.0)):
        shared, personal = of.layout.split(trainable_mask(of, trainable))
        assert set(shared.tolist()) <= {shared_one}
        assert set(personal.tolist()) <= {1 - shared_one}
    assert trainable_mask(of, "all") is None
