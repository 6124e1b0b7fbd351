"""The divided network against the whole one, for networks that can be divided and others."""

import attrs
import pytest
import torch
from torch import nn

from bfl_baselines.divided import Divided
from bflcore import Layout
from bflcore.testing.problems import IMAGE, convolutional, dense, problem


class Scaled(nn.Module):
    """A network that does not end with its head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return 2 * self.head(self.body(x).relu())


class Twice(Scaled):
    """A network that runs its head twice."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.head(self.body(x)))


def divided(network, head, sharing):
    network = network.double()
    layout = Layout.of(network, head, sharing)
    initial = layout.flatten(dict(network.named_parameters()))
    return attrs.evolve(problem(), network=network, layout=layout, initial=initial)
