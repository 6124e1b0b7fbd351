"""The methods `superfed-mm` and `superfed-lm`, and their inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from bfl_superfed.superfed import LowLossSubspace
from bflcore import FedAvg, Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference

# Table A1: SGD whose learning rate falls 1 % a round, ten epochs of minibatches of ten.
TRAINING: Mapping[str, object] = MappingProxyType(
    {
        "cohort": 5,
        "model": "two-nn",
        "inference.optimiser": "sgd",
        "inference.momentum": 0.9,
        "inference.weight_decay": 1e-4,
        "inference.lr": 0.01,
        "inference.lr_decay": 0.01,
        "inference.local_epochs": 10,
        "inference.batch_size": 10,
    }
)


class SuPerFedMM(Method):
    """Share a model, keep another, and mix them with one random lambda (model mixing)."""

    name = "superfed-mm"
    reference = "Hahn, Jeong & Lee 2022, Algorithm 1"
    inference = "low-loss-subspace"
    aggregator = FedAvg.aggregator  # what travels, and what becomes of it, is federated averaging
    weighting = FedAvg.weighting
    hyper = FedAvg.hyper
    defaults: ClassVar[Mapping[str, object]] = {**TRAINING, "inference.nu": 1.0}


class SuPerFedLM(Method):
    """Share a model, keep another, and mix them with one random lambda a layer (layer mixing)."""

    name = "superfed-lm"
    reference = "Hahn, Jeong & Lee 2022, Algorithm 1"
    inference = "low-loss-subspace"
    aggregator = FedAvg.aggregator
    weighting = FedAvg.weighting
    hyper = FedAvg.hyper
    defaults: ClassVar[Mapping[str, object]] = {
        **TRAINING,
        "inference.mixing": "layer",
        "inference.nu": 2.0,
    }


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference of eq. 3."""
    yield LowLossSubspace


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield both ways to mix."""
    yield SuPerFedMM
    yield SuPerFedLM
