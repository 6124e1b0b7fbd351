"""Problems: whose samples are whose, the cohorts they make, and the networks they run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bflcore.data import Dataset, Partition
from bflcore.layout import Layout
from bflcore.problem import Problem, Shares
from bflcore.problem.likelihoods import Categorical
from bflcore.testing.problems import IMAGE, convolutional, dense, normal, problem


def test_every_client_finds_its_own_samples_in_the_order_of_its_indices():
    x, y = torch.arange(6.0)[:, None], torch.arange(6)
    shares = Shares.gather(x, y, [[4, 1], [], [0, 5, 2]])
    assert [shares.of(client)[1].tolist() for client in range(3)] == [[4, 1], [], [0, 5, 2]]
    assert [shares.size(client) for client in range(3)] == [2, 0, 3]
    for client in range(3):
        found, labels = shares.of(client)
        assert found[:, 0].tolist() == labels.tolist()


def test_a_cohort_holds_the_training_samples_padded_to_the_largest_client():
    of = problem(sizes=(7, 5, 2))
    members = of.cohort([0, 2], {}, round=3)
    assert (members.clients, members.sizes, members.round) == ((0, 2), (7, 2), 3)
    assert members.x.shape == (2, 7, 3)
    for row, client in enumerate(members.clients):
        x, y = of.train.of(client)
        assert torch.equal(members.x[row, : len(x)], x)
        assert torch.equal(members.y[row, : len(y)], y)


def test_a_cohort_in_rising_order_of_size_is_refused():
    with pytest.raises(ValueError, match="sizes must fall"):
        problem(sizes=(7, 5, 2)).cohort([2, 0], {}, round=0)


@pytest.mark.parametrize(
    ("clients", "novel"), [([1], True), ([1, 2], True), ([0, 1], False), ([0], False)]
)
def test_a_cohort_is_novel_where_all_its_clients_were_held_out(clients, novel):
    of = problem(sizes=(7, 5, 2), novel=(1, 2))
    assert of.cohort(clients, {}, round=0).novel is novel


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("network", [dense, convolutional])
def test_each_client_runs_the_network_with_its_own_parameters(clients, network):
    shape = IMAGE if network is convolutional else (3,)
    of = problem(network(), shape=shape)
    weights, x = normal(clients, of.layout.total, seed=3), normal(clients, 4, *shape, seed=4)
    found = of.forward(weights, x)
    for row in range(clients):
        torch.nn.utils.vector_to_parameters(weights[row].clone(), of.network.parameters())
        torch.testing.assert_close(found[row], of.network(x[row]).detach())


def test_draws_are_run_one_by_one():
    of = problem()
    draws, x = normal(2, 3, of.layout.total, seed=3), normal(2, 4, 3, seed=4)
    found = of.outputs(draws, x)
    assert found.shape == (2, 3, 4, 2)
    for s in range(3):
        torch.testing.assert_close(found[:, s], of.forward(draws[:, s], x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_become_numbers_once_they_are_gathered(dtype):
    pixels = np.arange(12, dtype=np.uint8).reshape(4, 3)
    data = Dataset("bytes", "classification", pixels, np.arange(4) % 2, 2, unit=255.0)
    partition = Partition((np.array([2, 0]),), (np.array([1]),))
    network = dense()
    of = Problem.assemble(data, partition, network, Layout.of(network), Categorical(), dtype=dtype)
    assert of.train.x.dtype == of.test.x.dtype == dtype
    expected = torch.tensor([[6.0, 7, 8], [0, 1, 2]]) / 255
    assert torch.equal(of.train.x, expected.to(dtype))
    assert torch.equal(of.test.x, (torch.tensor([[3.0, 4, 5]]) / 255).to(dtype))
