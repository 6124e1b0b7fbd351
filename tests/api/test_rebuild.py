"""A run's network and inference, rebuilt without its samples."""

import pytest
import torch

from bflcore import OptionError
from bflcore.api.rebuild import rebuild
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry

FLAGS = {
    "seed": 5,
    "rounds": 9,
    "share": "body",
    "data": {"data": "synthetic", "partition": "natural", "clients": 3, "novel_clients": 1},
    "dataset": {"owners": 3, "samples": 20, "features": 6, "classes": 3},
    "inference": {"lr": 0.25},
    "model": {"name": "mlp", "hidden": (4,)},
}


@pytest.mark.parametrize("classes", [3, 0])
def test_a_problem_without_samples_is_the_same_otherwise(classes):
    registry = load_registry()
    flags = FLAGS | {"dataset": FLAGS["dataset"] | {"classes": classes}}
    prepared = prepare(resolve(registry, "fedavg", {}, flags))
    values = prepared.experiment.as_toml()
    problem, inference = rebuild(registry, values, prepared.description)
    of = prepared.problem
    assert torch.equal(problem.initial, of.initial)
    for name in ("layout", "likelihood", "clients", "novel", "seed", "rounds", "standardise"):
        assert getattr(problem, name) == getattr(of, name), name
    assert inference == prepared.experiment.inference
    assert [problem.train.size(c) for c in range(3)] == [of.train.size(c) for c in range(3)]
    assert not problem.train.x.any()
    assert problem.train.y.shape[1:] == of.train.y.shape[1:]


def test_a_missing_component_is_named():
    registry = load_registry()
    prepared = prepare(resolve(registry, "fedavg", {}, FLAGS))
    values = prepared.experiment.as_toml()
    for kind in ("model", "likelihood", "inference"):
        changed = values | {kind: values[kind] | {"name": "absent"}}
        with pytest.raises(OptionError, match=f"{kind} absent is not installed"):
            rebuild(registry, changed, prepared.description)
