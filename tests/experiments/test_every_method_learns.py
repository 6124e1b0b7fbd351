"""Every method that is installed learns with its defaults: no option needs to be known first."""

from __future__ import annotations

from functools import cache

import pytest

from bflcore.data.sources import MNIST5k
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import execute
from bflcore.registry.loading import load_registry

METHODS = load_registry().methods
# One method for each way to infer; the others are combinations, or share their training with one.
ALWAYS = {
    *("fedavg", "fedvi", "bpfed", "fedsi-fac", "superfed-mm", "em-tdamp", "mc-dropout"),
    *("pfedbayes", "fedpop", "ditto"),
}
# Two rounds are enough, except for a wide initial Gaussian and for message passing as in the paper.
ROUNDS = {"bfl-best": 10, "bpfed": 10, "em-tdamp-paper": 10}
SMALLER = {"glm": "digits"}  # a precision matrix over all coefficients: fewer pixels
CONSTANT = 0.1  # the accuracy of a constant: every client has as many samples of each class


def marked(method):
    marks = () if method in ALWAYS else pytest.mark.thorough
    return pytest.param(method, marks=marks)


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    monkeypatch.setattr(MNIST5k, "load", lambda *_: digits())


@cache
def digits(load=MNIST5k.load):
    return load(MNIST5k())


@pytest.mark.parametrize("method", [marked(method) for method in METHODS])
def test_a_method_beats_a_constant_by_far_with_its_defaults(tmp_path, method):
    settings = {
        "rounds": ROUNDS.get(method, 2),
        "eval_every": 100,
        "data": {
            "data": SMALLER.get(method, "mnist5k"),
            "clients": 5,
            "train_per_class": 20,
            "test_per_class": 10,
        },
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(load_registry(), method, {}, settings))
    summary = execute(prepared, RunDirectory.create(tmp_path / "run", prepared, load_registry()))
    assert summary["final"]["personal.accuracy"]["mean"] > 4 * CONSTANT
