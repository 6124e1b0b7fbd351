"""Warnings before a run: what its user hardly intends."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from bflcore import Aggregator, Variational, __version__
from bflcore.engines.local import Local
from bflcore.experiments.caveats import caveats
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry


class Product(Aggregator):
    """Adds evidence."""

    name = "product"
    weighs = False
    ignores_weights_because = "every client's evidence counts in full"

    def fuse(self, posteriors, weights, prior):
        return prior


class Certain(Variational):
    """Leaves some parameters certain."""

    leaves_certain = True


class Multiplies(Product):
    """Multiplies densities."""

    name = "multiplies"
    tags = frozenset({"adds-precision"})


class Switch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.fixture
def prepared():
    flags = {
        "data": {"data": "synthetic", "partition": "natural", "clients": 3},
        "dataset": {"owners": 3, "samples": 20, "features": 6, "classes": 3},
    }
    return prepare(resolve(load_registry(), "fedvi", {}, flags))


def own(path, **flags):
    data = {"data": str(path), **flags.pop("data", {})}
    return prepare(resolve(load_registry(), "fedavg", {}, {"data": data, **flags}))


def test_clients_without_test_samples_are_named(tmp_path):
    path = tmp_path / "a.npz"
    client = np.array([900] + [7] * 10 + [107])
    np.savez(
        path, x=np.random.default_rng(0).normal(size=(12, 2)), y=np.arange(12) % 2, client=client
    )
    found = caveats(own(path))
    assert found == ["clients without test samples, which are not evaluated: 107, 900"]
    none = caveats(own(path, data={"train_per_class": 100}))
    assert len(none) == 1
    assert none[0].startswith("no client has a test sample, so that nothing is evaluated")
    with_tests = own(path, data={"clients": 2, "partition": "iid"})
    assert caveats(with_tests) == []


@pytest.mark.parametrize(
    ("scale", "shift", "y", "warned"),
    [
        ([1, 1], [0, 0], [0, 1], ""),
        ([1, 3e4], [0, 1e5], [0, 1], "feature 1 is about 1e+05 in size"),
        ([1, 1], [-300, 0], [0, 1], "feature 0 is about 3e+02 in size"),
        ([1, 1], [0, 0], [1e5, 2.5], "target 0 is about 7e+04 in size"),
    ],
)
def test_features_and_targets_that_nothing_scales_are_pointed_out(
    tmp_path, scale, shift, y, warned
):
    path = tmp_path / "a.npz"
    x = np.random.default_rng(0).normal(size=(60, 2)) * scale + shift
    np.savez(path, x=x, y=np.array(y)[np.arange(60) % 2])
    (found,) = caveats(own(path)) or [""]
    assert found.startswith(warned)
    assert bool(found) == bool(warned)
    assert not warned or "-o dataset.standardise=true" in found
    assert caveats(own(path, dataset={"standardise": True})) == []


def with_parts(prepared, **parts):
    return attrs.evolve(prepared, experiment=attrs.evolve(prepared.experiment, **parts))


def switching(prepared):
    network = nn.Sequential(nn.Linear(6, 4), Switch(), nn.Linear(4, 3))
    return attrs.evolve(prepared, problem=attrs.evolve(prepared.problem, network=network))


def test_an_ordinary_experiment_has_no_caveats(prepared):
    assert caveats(prepared) == []
    assert caveats(with_parts(prepared, engine=Local(chunk=3))) == []


def test_an_installation_that_is_older_than_its_code_is_warned_of(prepared, stale_install):
    (text,) = caveats(prepared)
    assert text.startswith(f"bflcore is installed as version 0.0.1, but its code is {__version__}")
    assert "make install" in text
    assert "\n" not in text


def test_certain_parameters_and_a_rule_that_multiplies_densities_are_warned_of(prepared):
    (text,) = caveats(with_parts(prepared, inference=Certain(), aggregator=Multiplies()))
    assert "inference variational" in text
    assert "aggregator multiplies" in text
    assert "--aggregator average" in text
    assert "\n" not in text


def test_either_alone_is_not_warned_of(prepared):
    assert caveats(with_parts(prepared, inference=Certain())) == []
    assert caveats(with_parts(prepared, aggregator=Multiplies())) == []
    assert caveats(with_parts(prepared, inference=Certain(), aggregator=Product())) == []


@pytest.mark.parametrize(
    ("chunk", "cohort", "together"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 2), (9, 0, 3), (3, 2, 2), (3, 1, 0)],
)
def test_a_network_that_cannot_be_batched_is_warned_of_where_clients_train_together(
    prepared, chunk, cohort, together
):
    run = attrs.evolve(prepared.experiment.run, cohort=cohort)
    found = caveats(with_parts(switching(prepared), engine=Local(chunk=chunk), run=run))
    assert len(found) == bool(together)
    for text in found:
        assert f"the {together} clients of a training step" in text
        assert "layer 1 (Switch)" in text
        assert "\n" not in text


def test_on_a_gpu_all_clients_train_together(prepared):
    of = prepared.problem
    train = attrs.evolve(of.train, x=of.train.x.to("meta"))
    assert Local().clients_per_step(attrs.evolve(of, train=train)) == 3
    assert Local().clients_per_step(of) == 1
    assert Local(chunk=2).clients_per_step(of) == 2
    assert torch.device("meta") == train.x.device
