"""What the kit sees of a part that changes what everybody in the process shares."""

import random

import numpy as np
import pytest
import torch

from bflcore.testing.surroundings import GLOBALS, restored, undisturbed

CHANGES = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch's anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "torch's precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's global generator": lambda: torch.rand(1),
    "numpy's global generator": lambda: np.random.rand(1),  # noqa: NPY002
    "Python's global generator": random.random,
}


def test_every_setting_has_a_change():
    assert CHANGES.keys() == GLOBALS.keys()


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_change_is_named_and_taken_back(name):
    before = GLOBALS[name][0]()
    said = f"^the part changes {name} for everybody"
    with pytest.raises(AssertionError, match=said), undisturbed("the part"):
        CHANGES[name]()
    assert str(GLOBALS[name][0]()) == str(before)


def test_what_is_printed_is_quoted_and_nothing_else_is_said():
    said = "^the part prints 'a b'; return numbers"
    with pytest.raises(AssertionError, match=said), undisturbed("the part"):
        print("a\n b")  # noqa: T201
    with undisturbed("the part"):
        pass


def fail_without_gradients():
    torch.set_grad_enabled(False)
    raise KeyError


def test_settings_are_restored_after_an_error():
    with pytest.raises(KeyError), restored():
        fail_without_gradients()
    assert torch.is_grad_enabled()
