"""The methods `superfed-mm` and `superfed-lm`, and their inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_superfed.superfed import LowLossSubspace
from bflcore import Method, hookimpl
from bflcore.models import TwoNN

if TYPE_CHECKING:
    from bflcore import LocalInference


class SuPerFedMM(Method):
    """Share one model, keep another, and mix them with a single random lambda."""

    name = "superfed-mm"
    reference = "Hahn, Jeong & Lee 2022, Algorithm 1"
    # Table A1: SGD, 1 % learning rate decay per round, ten epochs, batch size ten.
    inference = LowLossSubspace(
        nu=1.0,
        optimiser="sgd",
        momentum=0.9,
        weight_decay=1e-4,
        lr=0.01,
        lr_decay=0.01,
        local_epochs=10,
        batch_size=10,
    )
    model = TwoNN()
    settings = {"cohort": 5}


class SuPerFedLM(Method):
    """Share one model, keep another, and mix them with a random lambda per layer."""

    name = "superfed-lm"
    reference = "Hahn, Jeong & Lee 2022, Algorithm 1"
    inference = SuPerFedMM.inference.replace(mixing="layer", nu=2.0)
    model = SuPerFedMM.model
    settings = SuPerFedMM.settings


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference of eq. 3."""
    yield LowLossSubspace


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the methods with model mixing and layer mixing."""
    yield SuPerFedMM
    yield SuPerFedLM
