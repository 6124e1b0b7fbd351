"""A tiny benchmark of digits, executed once for all tests that read its results."""

import pytest

from bfl_shift import page, ranks, rerun, settings
from bfl_shift.benchmark import Benchmark
from bfl_shift.settings import CLEAN, NOISY, TINY, Setting
from bfl_shift.shifts import chosen_shifts
from bfl_shift.table import table_of
from bflcore.cli.fixture import bfl

__all__ = ["bfl"]

TOY = Setting(
    "toy",
    "digits: 4 clients and a novel one",
    flags={
        "data": "digits",
        "partition": "labels:5",
        "clients": 5,
        "novel_clients": 1,
        "train_per_class": 12,
        "test_per_class": 6,
        "calibration_fraction": 0.25,
        "calibrate": ("conformal",),
        "ood": "none",
        "model": "mlp",
        "rounds": 2,
        "local_epochs": 2,
        "eval_every": 2,
    },
    options={"model.hidden": (8,), "calibrator.conformal.scope": "federated"},
    trainings={
        CLEAN: {},
        TINY: {"train_per_class": 4},
        NOISY: {"label_noise": "symmetric:0.3"},
    },
    foreign={"ood-digits": (CLEAN, "mnist5k")},
)


@pytest.fixture(scope="session")
def tiny():
    """Return the tiny setting."""
    return TOY


@pytest.fixture
def toy(monkeypatch):
    """Make the tiny setting the only one."""
    for module in (settings, ranks, rerun, page):
        monkeypatch.setattr(module, "SETTINGS", {TOY.name: TOY})
    return TOY


@pytest.fixture(scope="session")
def executed(tmp_path_factory):
    """Return the tiny benchmark with two methods, what it found, and what it said of scoring."""
    said = []
    asked = Benchmark(
        TOY, ("fedvi", "local"), chosen_shifts(TOY, ""), (0,), tmp_path_factory.mktemp("shift")
    )
    return asked, asked.execute(1, lambda _: None, said.append), said


@pytest.fixture(scope="session")
def table(executed):
    """Return the table of the tiny benchmark."""
    asked, found, _ = executed
    return table_of(asked, found, "bfl shift fedvi --seeds 0 --setting toy")
