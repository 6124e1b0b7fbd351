"""The divided network against the whole one, for networks that can be divided and for others."""

import pytest
import torch
from torch import nn

from bfl_baselines.divided import Divided
from bflcore.testing.problems import IMAGE, convolutional, normal, problem


class Headed(nn.Module):
    """A network whose head is its last module, in a module of modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)})

    def forward(self, x):
        return self.layers["head"](self.layers["body"](x).tanh())


class Scaled(Headed):
    """A network that goes on after its head."""

    def forward(self, x):
        return 2 * super().forward(x)


class Repeated(nn.Module):
    """A network that runs its head twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"body": nn.Linear(3, 2), "head": nn.Linear(2, 2)})

    def forward(self, x):
        head = self.layers["head"]
        return head(head(self.layers["body"](x)).tanh())


class Alone(nn.Module):
    """A network without a body."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)


HEADED = {"shape": (3,), "head": "layers.head"}


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize(
    ("build", "options", "sharing", "divides"),
    [
        (lambda: None, {}, "body", True),
        (convolutional, {"shape": IMAGE, "head": "4"}, "body", True),
        (Headed, HEADED, "body", True),
        (Headed, HEADED, "head", False),
        (Headed, HEADED, "all", False),
        (Headed, HEADED, "none", False),
        (Scaled, HEADED, "body", False),
        (Repeated, HEADED, "body", False),
        (Alone, {"head": "head"}, "body", False),
    ],
)
def test_body_and_head_are_the_network(build, options, sharing, divides, clients):
    of = problem(build(), sharing=sharing, **options)
    x = normal(clients, 5, *options.get("shape", (3,)))
    weights = normal(clients, of.layout.total, seed=3)
    w, z = of.layout.split(weights)
    network = Divided(of, x[0, :1])
    features = network.features(w, x)
    assert (features is not x) == divides
    torch.testing.assert_close(network.outputs(w, z, features), of.forward(weights, x))
    before = problem(build(), **options).network
    assert str(of.network) == str(before)  # the problem's own network stays whole


def test_a_body_runs_once_for_all_heads():
    calls = []

    class Counted(Headed):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    of = problem(Counted(), sharing="body", **HEADED)
    w, z = of.layout.split(normal(1, of.layout.total))
    network = Divided(of, normal(1, 3))
    calls.clear()
    features = network.features(w, normal(1, 5, 3))
    for _ in range(4):
        network.outputs(w, z, features)
    assert calls == [5]
