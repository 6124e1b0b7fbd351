"""Models with one mistake fail the checks that name it, and no others."""

import pytest
import torch
from torch import nn

from bflcore.errors import OptionError
from bflcore.models import StackedLSTM, TwoNN
from bflcore.models.base import Model
from bflcore.testing import model_checks

from .verdicts import failing, label, reasons, sentences, wrong

OUTPUTS = "gives an output per class"
HEAD = "has a head"
ALONE = "samples are independent"
REPEATS = "repeats itself"
PROCESS = "leaves the process as it was"


class Flat(Model):
    """Take a table."""

    name = "flat"

    def network(self, input_shape, outputs):
        if len(input_shape) > 1:
            raise OptionError("no images")
        return nn.Sequential(*self.hidden(), nn.Linear(4, outputs))

    def hidden(self):
        return nn.Linear(4, 4), nn.ReLU()


class Codes(Flat):
    """Read whole numbers alone."""

    name = "codes"

    def check_samples(self, x):
        if (x != x.floor()).any() or (x < 0).any():
            raise OptionError("no codes")

    def hidden(self):
        class Lookup(nn.Module):
            def forward(self, x):
                return torch.eye(4)[x.long()][:, 0] + x

        return Lookup(), nn.Linear(4, 4)


def drawn_elsewhere(self):
    layer, noise = nn.Linear(4, 4), torch.Generator()
    noise.seed()
    layer.weight.data = torch.randn(4, 4, generator=noise)
    return (layer,)


def batch_norm(self):
    return nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)


def take_all_threads(self):
    torch.set_num_threads(7)
    return Flat.hidden(self)


def one_output(self, input_shape, outputs):
    return Flat.network(self, input_shape, 1)


def refuse(self, input_shape, outputs):
    raise OptionError("never")


WRONG = [
    (wrong(Flat, "Has one output", network=one_output), {OUTPUTS}),
    (wrong(Flat, "Names no module", head=lambda self, network: "head"), {HEAD}),
    (wrong(Flat, "Names a module without parameters", head=lambda self, network: "1"), {HEAD}),
    (wrong(Flat, "Names the whole network", head=lambda self, network: ""), {HEAD}),
    (wrong(Flat, "Keeps statistics", hidden=lambda self: (nn.BatchNorm1d(4),)), {ALONE}),
    (wrong(Flat, "Drops units", hidden=lambda self: (nn.Linear(4, 4), nn.Dropout(0.5))), {ALONE}),
    (wrong(Flat, "Normalises over the batch", hidden=batch_norm), {ALONE}),
    (wrong(Flat, "Draws from elsewhere", hidden=drawn_elsewhere), {REPEATS}),
    (wrong(Flat, "Accepts nothing", network=refuse), {OUTPUTS, HEAD, ALONE, REPEATS, PROCESS}),
    (wrong(Flat, "Takes all threads", hidden=take_all_threads), {PROCESS}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_model_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("part", [wrong(Flat, "Nothing"), TwoNN, StackedLSTM, Codes])
def test_a_right_model_passes(part):
    assert failing(part) == set()


def test_every_check_has_a_model_that_fails_it():
    names = sentences(model_checks.checks_of(Flat))
    assert set().union(*(expected for _, expected in WRONG)) == names


def test_the_reason_lists_the_modules_there_are():
    (part,) = (part for part, _ in WRONG if part.summary() == "Names no module.")
    assert reasons(part)[HEAD] == "head 'head' is not a module; modules: 0, 1, 2"
