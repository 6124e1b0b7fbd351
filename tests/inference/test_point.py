"""Point estimates: the step by hand, the two pulls, and cohorts against clients alone."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

from bflcore import Broadcast, Map, Point
from bflcore.problem.likelihoods import GaussianNoise
from bflcore.testing.problems import cohort, convolutional, first_broadcast, normal, problem

ONE_STEP = {"optimiser": "sgd", "local_epochs": 1, "batch_size": 100}


def linear(**options):
    """Return a problem with one linear layer."""
    return problem(nn.Linear(3, 2), head="", **options)


def fitted(inference, of, members=None, broadcast=None):
    members = members or cohort(of, inference)
    return inference.fit(of, broadcast or first_broadcast(inference, of), members)


def softmax_gradient(of, client):
    """Return the loss and its gradient in weights and biases, by the textbook's formula."""
    x, y = (t.numpy() for t in of.train.of(client))
    weight, bias = of.initial[:6].view(2, 3).numpy(), of.initial[6:].numpy()
    logits = x @ weight.T + bias
    error = (special.softmax(logits, axis=1) - np.eye(2)[y]) / len(y)
    loss = -special.log_softmax(logits, axis=1)[np.arange(len(y)), y].mean()
    gradient = np.concatenate([(error.T @ x).ravel(), error.sum(0)])
    return loss, torch.as_tensor(gradient)


def test_a_full_batch_step_is_the_one_done_by_hand():
    of = linear()
    result = fitted(Map(lr=0.3, **ONE_STEP), of)
    for row, client in enumerate(result.clients):
        loss, gradient = softmax_gradient(of, client)
        np.testing.assert_allclose(result.posterior.mean[row], of.initial - 0.3 * gradient)
        np.testing.assert_allclose(result.loss[row], loss)


def test_the_anchor_pulls_to_the_priors_mean():
    of = linear()
    inference = Map(lr=0.3, anchor=0.7, **ONE_STEP)
    prior = Point(normal(8, seed=5))
    result = fitted(inference, of, broadcast=Broadcast(0, Point(of.initial), prior))
    for row, client in enumerate(result.clients):
        gradient = softmax_gradient(of, client)[1] + 0.7 * (of.initial - prior.mean)
        np.testing.assert_allclose(result.posterior.mean[row], of.initial - 0.3 * gradient)


def test_weight_decay_pulls_to_zero():
    of = linear()
    result = fitted(Map(lr=0.3, weight_decay=0.7, **ONE_STEP), of)
    for row, client in enumerate(result.clients):
        gradient = softmax_gradient(of, client)[1] + 0.7 * of.initial
        np.testing.assert_allclose(result.posterior.mean[row], of.initial - 0.3 * gradient)


def test_the_pulls_are_not_part_of_the_loss():
    of = linear()
    plain = fitted(Map(lr=0.3, **ONE_STEP), of)
    pulled = fitted(Map(lr=0.3, weight_decay=9.0, anchor=9.0, **ONE_STEP), of)
    assert torch.equal(plain.loss, pulled.loss)


def test_a_regression_converges_to_ridge_regression():
    of = linear(sizes=(12,), likelihood=GaussianNoise(noise_variance=0.5))
    inference = Map(
        lr=0.2, weight_decay=0.4, local_epochs=400, batch_size=12, optimiser="sgd", momentum=0.5
    )
    result = fitted(inference, of)
    x, y = (t.numpy() for t in of.train.of(0))
    design = np.hstack([x, np.ones((12, 1))])
    solution = np.linalg.solve(design.T @ design / (12 * 0.5) + 0.4 * np.eye(4), design.T @ y / 6)
    expected = np.concatenate([solution[:3].T.ravel(), solution[3]])
    np.testing.assert_allclose(result.posterior.mean[0], expected, rtol=1e-8)


MANY_STEPS = {
    "adam": Map(lr=0.02, local_epochs=2, batch_size=3),
    "momentum": Map(lr=0.1, optimiser="sgd", momentum=0.8, local_epochs=2, batch_size=3),
    "pulled": Map(lr=0.02, local_epochs=2, batch_size=3, anchor=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("inference", MANY_STEPS.values(), ids=MANY_STEPS)
@pytest.mark.parametrize("sharing", ["all", "body"])
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_a_cohort_of_unequal_clients_equals_each_of_them_alone(inference, sharing, kind):
    network = {"shape": (3,), "head": "2"}
    if kind == "convolutional":
        network = {"network": convolutional(), "shape": (2, 4, 4), "head": "4"}
    of = problem(sharing=sharing, **network)
    together = fitted(inference, of)
    for row, client in enumerate(together.clients):
        alone = fitted(inference, of, cohort(of, inference, [client]))
        expected = {**alone.posterior.pack(), **alone.memory, "loss": alone.loss}
        found = {**together.posterior.pack(), **together.memory, "loss": together.loss}
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name][row], tensor[0], rtol=1e-12, atol=1e-12)


def test_one_clients_broken_data_leaves_the_others_untouched():
    of, inference = problem(), MANY_STEPS["adam"]
    members = cohort(of, inference)
    clean = fitted(inference, of, members)
    x = members.x.clone()
    x[1] = torch.nan
    broken = fitted(inference, of, attrs.evolve(members, x=x))
    assert broken.posterior.mean[1].isnan().any()
    assert broken.loss[1].isnan()
    for row in (0, 2):
        assert torch.equal(broken.posterior.mean[row], clean.posterior.mean[row])
        assert torch.equal(broken.loss[row], clean.loss[row])


def test_what_lies_in_the_padding_does_not_matter():
    of, inference = problem(), MANY_STEPS["adam"]
    members = cohort(of, inference)
    x = members.x.clone()
    for row, size in enumerate(members.sizes):
        x[row, size:] = torch.nan
    garbage = fitted(inference, of, attrs.evolve(members, x=x))
    assert torch.equal(garbage.posterior.mean, fitted(inference, of, members).posterior.mean)


def test_fitting_changes_neither_the_problem_nor_what_was_sent():
    of, inference = problem(sharing="body"), MANY_STEPS["adam"]
    members, broadcast = cohort(of, inference), first_broadcast(inference, of)
    tensors = [
        *of.network.parameters(),
        of.initial,
        of.train.x,
        members.x,
        *members.memory.values(),
        broadcast.start.mean,
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    fitted(inference, of, members, broadcast)
    fitted(inference, of, cohort(of, inference, [0]), broadcast)
    assert all(map(torch.equal, before, tensors))


def test_training_continues_from_the_clients_memory():
    of, inference = problem(sharing="body"), Map(lr=0.3, **ONE_STEP)
    members = cohort(of, inference)
    own = normal(3, of.layout.personal_total, seed=8)
    remembered = attrs.evolve(members, memory={"personal.mean": own})
    still = attrs.evolve(inference, lr=1e-300)
    assert torch.equal(fitted(still, of, remembered).memory["personal.mean"], own)


def test_the_same_round_is_fitted_to_the_same_bits():
    of, inference = problem(), MANY_STEPS["adam"]
    first, again = fitted(inference, of), fitted(inference, of)
    later = fitted(inference, of, cohort(of, inference, round=1))
    assert torch.equal(first.posterior.mean, again.posterior.mean)
    assert not torch.equal(first.posterior.mean, later.posterior.mean)


def test_a_novel_client_fits_its_head_alone_to_the_fixed_body():
    of = problem(sharing="body", novel=(1,))
    inference = Map(lr=0.3, optimiser="sgd", local_epochs=4, batch_size=100)
    body = Point(normal(of.layout.shared_total, seed=8))
    members = cohort(of, inference, [1])
    memory = inference.personalise(of, Broadcast(0, body, body), members)

    x, y = of.train.of(1)
    whole = of.layout.unflatten(of.layout.join(body.mean, members.memory["personal.mean"][0]))
    features = torch.tanh(x @ whole["0.weight"].T + whole["0.bias"])
    head = nn.Linear(4, 2).double()
    head.weight.data, head.bias.data = whole["2.weight"].clone(), whole["2.bias"].clone()
    descent = torch.optim.SGD(head.parameters(), lr=0.3)
    for _ in range(4):
        descent.zero_grad()
        nn.functional.cross_entropy(head(features), y).backward()
        descent.step()
    expected = torch.cat([p.detach().reshape(-1) for p in head.parameters()])
    assert set(memory) == {"personal.mean"}
    torch.testing.assert_close(memory["personal.mean"][0], expected)


@pytest.mark.parametrize(("sharing", "novel"), [("body", False), ("all", True)])
def test_clients_that_trained_or_own_nothing_do_not_adapt(sharing, novel):
    of, inference = problem(sharing=sharing), MANY_STEPS["adam"]
    members = attrs.evolve(cohort(of, inference), novel=novel)
    broadcast = first_broadcast(inference, of)
    assert inference.personalise(of, broadcast, members) is members.memory


def test_a_prediction_is_the_networks_softmax_in_one_draw():
    of, inference = problem(sharing="body"), MANY_STEPS["adam"]
    members, broadcast = cohort(of, inference), first_broadcast(inference, of)
    own = {"personal.mean": normal(3, of.layout.personal_total, seed=8)}
    members = attrs.evolve(members, memory=own)
    draws = inference.predict(of, broadcast, members, members.x).draws
    assert draws.shape == (3, 1, 7, 2)
    for row in range(3):
        whole = of.layout.join(broadcast.start.mean, own["personal.mean"][row])
        torch.nn.utils.vector_to_parameters(whole, of.network.parameters())
        torch.testing.assert_close(draws[row, 0], of.network(members.x[row]).softmax(-1).detach())
