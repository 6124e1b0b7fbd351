"""Every method, exported: a server without samples and nodes with raw features of their own."""

from __future__ import annotations

import json

import pytest
import torch

import bflcore
from bfl_flower.app import DATA, build_node, without_samples
from bfl_flower.export import export, form_of, refuse
from bfl_flower.session import GridSession
from bflcore.errors import OptionError
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import assemble, prepare
from bflcore.experiments.resolve import read, resolve
from bflcore.experiments.run import execute
from bflcore.options import options_of
from bflcore.registry.loading import load_registry
from bflcore.testing.problems import QUICK

from .loopback import Loopback

REGISTRY = load_registry()
METHODS = sorted(name for name in REGISTRY.methods if name != "centralised")


def experiment_of(method):
    known = {option.name for option in options_of(type(REGISTRY.methods[method].inference))}
    flags = {
        "rounds": 3,
        "seed": 4,
        "data": {"data": "synthetic", "partition": "natural", "clients": 3},
        "dataset": {
            "owners": 3,
            "samples": 20,
            "features": 6,
            "classes": 3,
            "standardise": True,  # by what the clients answer
        },
        "model": {"name": "mlp", "hidden": (5,)},
        "inference": {name: value for name, value in QUICK.items() if name in known},
        "engine": {"workers": 1},
    }
    return resolve(REGISTRY, method, {}, flags)


def records(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("method", METHODS)
def test_an_exported_method_gives_the_local_numbers_on_raw_features(method, tmp_path):
    prepared = prepare(experiment_of(method))
    execute(prepared, RunDirectory.create(tmp_path / "local", prepared, REGISTRY))
    app = tmp_path / "app"
    refuse(prepared, form_of(prepared))
    export(app, prepared, REGISTRY, form_of(prepared), with_data=True)
    experiment = resolve(REGISTRY, method, read(app / "experiment.toml"), {})
    nodes = {}
    for client in range(3):
        data = app / "nodes" / f"client-{client}.npz"
        nodes[10 + client] = build_node(app, client, data, tmp_path / f"state-{client}")
    server = assemble(experiment, *without_samples(read(app / DATA), experiment))
    family = type(experiment.inference.initial(server.problem))
    session = GridSession(Loopback(nodes), family, range(3))
    execute(server, RunDirectory.create(tmp_path / "flower", server, REGISTRY), session=session)
    assert records(tmp_path / "flower") == records(tmp_path / "local")
    local = bflcore.load(tmp_path / "local")
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    for client in range(3):  # each node has its own model, and the server has none of them
        model = bflcore.load_model(tmp_path / f"state-{client}" / "model.bfl")
        assert torch.equal(model.predict(x).draws, local.client(client).predict(x).draws)
        with pytest.raises(bflcore.RunError, match="is not here: it is on the machine that"):
            bflcore.load(tmp_path / "flower").client(client)


def test_a_method_that_pools_samples_is_refused_by_its_tag():
    prepared = prepare(experiment_of("centralised"))
    form = form_of(prepared)
    with pytest.raises(OptionError, match="inference pooled trains on the pooled samples of all"):
        refuse(prepared, form)
