"""Jacobians against autograd, one output of one sample at a time."""

import pytest
import torch
from torch import nn

from bfl_fedsi import jacobians
from bflcore.testing.problems import convolutional, normal, problem


class Twice(nn.Module):
    """A network that runs its first layer two times."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Places(nn.Module):
    """A network that runs a linear layer at every place of a sample."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(2, 3), nn.Linear(12, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x.unflatten(1, (4, 2)))).flatten(1))


class Sequence(nn.Module):
    """A recurrent network, for which `torch.func` has no rule."""

    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.cells(x.unflatten(1, (4, 2)))[1][0][0])


class Tied(nn.Module):
    """A network whose layers share their weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


CASES = {
    "an LSTM": (lambda: problem(Sequence(), shape=(8,), head="head"), jacobians.Dense),
    "an LSTM, the body travels": (
        lambda: problem(Sequence(), shape=(8,), head="head", sharing="body"),
        jacobians.Dense,
    ),
    "tied weights": (lambda: problem(Tied(), head="head"), jacobians.Dense),
    "linear layers, everything travels": (problem, jacobians.Linear),
    "linear layers, the body travels": (lambda: problem(sharing="body"), jacobians.Linear),
    "linear layers, the head travels": (lambda: problem(sharing="head"), jacobians.Linear),
    "a convolution": (
        lambda: problem(convolutional(), shape=(2, 4, 4), head="4", sharing="body"),
        jacobians.Dense,
    ),
    "a layer used twice": (lambda: problem(Twice(), head="head"), jacobians.Dense),
    "a layer at many places": (
        lambda: problem(Places(), shape=(8,), head="head"),
        jacobians.Dense,
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    make, kind = CASES[request.param]
    of = make()
    block = next(jacobians.blocks(of, of.initial, of.train.x, 1))
    assert type(block) is kind
    return of, block


def by_autograd(of):
    rows = []
    for x in of.train.x:
        theta = of.initial.clone().requires_grad_()
        outputs = of.forward(theta[None], x[None, None])[0, 0]
        each = [torch.autograd.grad(o, theta, retain_graph=True)[0] for o in outputs]
        rows.append(torch.stack([of.layout.split(row)[0] for row in each]))
    return torch.stack(rows)


def test_columns_are_those_that_autograd_finds(case):
    of, block = case
    index = torch.arange(0, of.layout.shared_total, 3)
    torch.testing.assert_close(block.columns(index), by_autograd(of)[:, :, index])


def test_outputs_are_the_networks(case):
    of, block = case
    torch.testing.assert_close(block.outputs, of.forward(of.initial[None], of.train.x[None])[0])


def test_sums_and_products_are_those_of_the_whole_jacobian(case):
    of, block = case
    rows = by_autograd(of)
    factor = normal(len(rows), 2, 2, seed=7)
    moved = factor.mT @ rows
    variance = normal(of.layout.shared_total, seed=8).exp()
    torch.testing.assert_close(block.times(factor).squares(), moved.square().sum((0, 1)))
    torch.testing.assert_close(block.quadratic(variance), (rows * variance) @ rows.mT)
    index = torch.arange(1, of.layout.shared_total, 2)
    vectors = normal(5, len(index), seed=9)
    torch.testing.assert_close(block.dot(index, vectors), rows[:, :, index] @ vectors.T)


def test_blocks_divide_the_samples_and_change_nothing(case, monkeypatch):
    of, whole = case
    monkeypatch.setattr(jacobians, "ELEMENTS", 1)
    parts = list(jacobians.blocks(of, of.initial, of.train.x, 1))
    assert len(parts) == len(of.train.x)
    torch.testing.assert_close(sum(part.squares() for part in parts), whole.squares())


def test_neither_the_network_nor_its_gradients_are_touched():
    of = problem()
    before = [p.clone() for p in of.network.parameters()]
    next(jacobians.blocks(of, of.initial + 1, of.train.x, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, of.network.parameters(), strict=True))
    assert all(p.grad is None for p in of.network.parameters())
