"""A finished run is used without its data: what it predicts is what was evaluated."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import bflcore
from bflcore.options import options_of

from ..interrupted import METHODS, inference_of

OWNERS = (7, 107, 900)
FEATURES, CLASSES = 6, 3
QUICK = {
    "local_epochs": 1,
    "head_epochs": 1,
    "steps": 1,
    "predict_draws": 3,
    "fine_tune_epochs": 1,
}


def table(seed=0, samples=25):
    """Return three owners' samples: classes are separated, owners are shifted."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples * len(OWNERS)) % CLASSES
    owner = np.repeat(OWNERS, samples)
    x = rng.normal(size=(len(y), FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[y]
    return {"x": x.astype(np.float32), "y": y, "client": owner}


def options_for(method):
    known = {field.name for field in options_of(inference_of(method))}
    chosen = {f"inference.{name}": v for name, v in QUICK.items() if name in known}
    return chosen | {"model.hidden": (5,)}


def trained(folder, method="fedavg", data=None, options=None, **flags):
    """Train for two rounds, remove the data, and return the run with its test samples."""
    path = folder / "hospitals.npz"
    arrays = table() if data is None else data
    np.savez(path, **arrays)
    given = {"rounds": 2, "cohort": 2, "workers": 1, "model": "mlp", "seed": 3} | flags
    run = bflcore.run(
        method,
        data=path,
        partition="natural",
        clients=len(OWNERS),
        out=folder / "run",
        options=options_for(method) if options is None else options,
        **given,
    )
    path.unlink()
    with np.load(run.path / "partition.npz") as file:
        parts = np.split(file["test"], file["test_sizes"].cumsum()[:-1])
    tests = [(arrays["x"][part], arrays["y"][part]) for part in parts]
    return run, tests


def evaluated(run, group="personal"):
    found = json.loads((run.path / "evaluation.json").read_text())
    return {entry["client"]: entry for entry in found[group]["clients"]}


def accuracy_and_nll(prediction, y):
    """Add up over the samples as an evaluation does, from the probabilities alone."""
    p, labels = prediction.probabilities, torch.as_tensor(y)
    chosen = p.gather(1, labels[:, None])[:, 0].clamp_min(1e-12)
    hits = (prediction.labels == labels).double().sum()
    return float(hits) / len(y), float(-chosen.log().sum()) / len(y)


@pytest.mark.filterwarnings("ignore::UserWarning")  # caveats of tiny runs
@pytest.mark.parametrize("method", METHODS)
def test_predictions_without_the_data_are_those_of_the_evaluation_to_the_bit(tmp_path, method):
    run, tests = trained(tmp_path, method)
    found = evaluated(run)
    loaded = bflcore.load(run.path)
    assert loaded.clients == list(OWNERS)
    assert list(found) == [0, 1, 2]
    for number, (x, y) in enumerate(tests):
        expected = found[number]["accuracy"], found[number]["nll"]
        model = loaded.client(OWNERS[number])
        assert accuracy_and_nll(model.predict(x), y) == expected
        moved = tmp_path / f"{number}.safetensors"
        again = bflcore.load_model(model.save(moved))
        assert (again.id, accuracy_and_nll(again.predict(x), y)) == (OWNERS[number], expected)
