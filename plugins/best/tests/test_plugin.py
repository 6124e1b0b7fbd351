"""The recipe `bfl-best`: its parts, and what it does where clients hold different labels."""

from __future__ import annotations

import json

import numpy as np
import pytest

import bflcore
from bflcore import Categorical, Continual, Equal, OptionError, Variational
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry

CLIENTS = 4
FAST = {"model.hidden": (20,), "inference.predict_draws": 5, "inference.local_epochs": 3}


def split_by_label(folder):
    """Write six classes that overlap; each of four clients has three of them, and not the rest."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(CLIENTS), 60)
    y = (owner + rng.integers(3, size=len(owner))) % 6
    x = rng.normal(size=(len(y), 8)) + 1.5 * np.eye(6, 8)[y]
    path = folder / "labels.npz"
    np.savez(path, x=x.astype(np.float32), y=y, client=owner)
    return path


def accuracy(run):
    found = json.loads((run.path / "evaluation.json").read_text())["personal"]["clients"]
    return np.mean([one["accuracy"] for one in found])


def trained(folder, name, data, method="bfl-best", **options):
    flags = {"data": data, "partition": "natural", "rounds": 15, "workers": 1, "model": "mlp"}
    return bflcore.run(method, out=folder / name, options=FAST | options, **flags)


def test_the_recipe_shares_everything_and_knows_each_clients_labels():
    method = resolve(load_registry(), "bfl-best", {}, {})
    assert isinstance(method.inference, Variational)
    assert isinstance(method.likelihood, Categorical)
    assert (method.hyper, method.weighting) == (Continual(), Equal())
    assert (method.run.share, method.likelihood.label_prior) == ("all", 1.0)
    assert method.inference.lr_at(0) > method.inference.lr_at(method.run.rounds - 1)


@pytest.mark.filterwarnings("ignore::UserWarning")  # caveats of tiny runs
def test_the_label_prior_is_worth_more_than_what_the_server_knows_without_it(tmp_path):
    data = split_by_label(tmp_path)
    run = trained(tmp_path, "with", data)
    found = json.loads((run.path / "evaluation.json").read_text())
    server = np.mean([one["accuracy"] for one in found["global"]["clients"]])
    assert accuracy(run) > server + 0.1
    absent = run.client(0).predict(np.zeros((5, 8), np.float32)).probabilities[:, 3:]
    assert float(absent.max()) < 0.02


def test_a_regression_is_refused_in_one_line():
    with pytest.raises(OptionError, match="categorical is for classification, but boston is a"):
        bflcore.run("bfl-best", data="boston", rounds=1)
