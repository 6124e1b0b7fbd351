"""The settings of the benchmark: which data, how many clients, how much training."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from bflcore.studies.cells import Cell

__all__ = ["ALONE", "APART", "CLEAN", "LEFT_OUT", "SETTINGS", "Setting", "cell_of", "named"]

CLEAN, TINY, NOISY, OTHER = "clean", "tiny-clients", "label-noise", "digits"  # trainings

ALONE = "local"  # what clients are compared with
APART = MappingProxyType({"centralised": "pools the data of all clients; it is not ranked"})
LEFT_OUT = MappingProxyType({"glm": "has no network to train; it is for tables"})


@attrs.frozen
class Setting:
    """Flags and options of `bflcore.run`, equal for all methods, and those of each training.

    `foreign` maps a shift to the training that it tests and to the data set that clients should
    tell from their own.
    """

    name: str
    summary: str
    flags: Mapping[str, Any]
    options: Mapping[str, object]
    trainings: Mapping[str, Mapping[str, Any]]
    foreign: Mapping[str, tuple[str, str]]

    def data_of(self, training: str) -> str:
        """Return the name of the data set of a training."""
        return str(self.trainings[training].get("data", self.flags["data"]))


SMALL = Setting(
    "small",
    "MNIST-5k and digits: 10 clients and 3 novel ones with five classes each, 20 samples per class",
    flags={
        "data": "mnist5k",
        "partition": "labels:5",
        "clients": 13,
        "novel_clients": 3,
        "train_per_class": 20,
        "test_per_class": 40,
        "calibration_fraction": 0.25,
        "calibrate": ("conformal",),
        "ood": "none",
        "model": "mlp",
        "rounds": 20,
        "local_epochs": 5,
        "eval_every": 20,
        "checkpoint_every": 20,
    },
    options={"model.hidden": (50,), "calibrator.conformal.scope": "federated"},
    trainings={
        CLEAN: {},
        TINY: {"train_per_class": 4},
        NOISY: {"label_noise": "symmetric:0.3"},
        OTHER: {"data": "digits", "train_per_class": 12, "test_per_class": 10},
    },
    foreign={"ood-mnist5k": (CLEAN, "fashion-mnist"), "ood-digits": (OTHER, "fashion-mnist")},
)

LARGE = Setting(
    "large",
    "Fashion-MNIST: 50 clients and 10 novel ones with five classes each, 50 samples per class",
    flags={
        "data": "fashion-mnist",
        "partition": "labels:5",
        "clients": 60,
        "novel_clients": 10,
        "train_per_class": 50,
        "test_per_class": 100,
        "calibration_fraction": 0.2,
        "calibrate": ("conformal",),
        "ood": "none",
        "model": "mlp",
        "rounds": 100,
        "eval_every": 100,
        "checkpoint_every": 10,
    },
    options={"calibrator.conformal.scope": "federated"},
    trainings={
        CLEAN: {},
        TINY: {"train_per_class": 4},
        NOISY: {"label_noise": "symmetric:0.3"},
    },
    foreign={"ood-mnist5k": (CLEAN, "mnist5k"), "ood-digits": (CLEAN, "digits")},
)

SETTINGS: Mapping[str, Setting] = MappingProxyType({one.name: one for one in (SMALL, LARGE)})


def cell_of(setting: Setting, training: str, method: str) -> Cell:
    """Return the cell of a study that trains a method."""
    flags = {**setting.flags, **setting.trainings[training]}
    return Cell(f"{training}.{method}", method, flags, dict(setting.options))


def named(cell: str) -> tuple[str, str]:
    """Return the training and the method of a cell's name."""
    training, _, method = cell.partition(".")
    return training, method
