"""One client's model: the posterior, draws of it, a network, a file."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import bflcore
from bflcore.experiments.models import read_tensors, save_tensors

from .test_runs import METHODS, OWNERS, options_for, table, trained

MODULE = """
import math
from torch import nn

def build(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))
"""


def logits(model, x):
    """Run the network at the mean on samples that need no scaling."""
    with torch.no_grad():
        return model.module()(torch.as_tensor(x))


def test_the_network_at_the_mean_of_a_point_estimate_is_its_prediction(tmp_path):
    run, tests = trained(tmp_path, "fedbabu")
    for number, (x, _) in enumerate(tests):
        model = run.client(OWNERS[number])
        expected = model.predict(x).probabilities
        assert torch.allclose(logits(model, x).softmax(1).double(), expected, atol=1e-6)
        (draw,) = model.sample(1)
        state = model.module().state_dict()
        assert draw.keys() == model.posterior["mean"].keys() == state.keys()
        assert all(torch.equal(draw[name], state[name]) for name in state)


@pytest.mark.filterwarnings("ignore::UserWarning")  # caveats of tiny runs
@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith(("superfed", "fedsi"))])
def test_the_network_at_the_mean_is_the_one_that_predicts(tmp_path, method):
    options = options_for(method)
    if method.startswith("superfed"):  # both networks of every client are trained, and mixed
        options |= {"inference.start": 0, "inference.lr": 0.3}
        options |= {"inference.lambda_selection": "fixed", "inference.fixed_lambda": 0.3}
    run, tests = trained(tmp_path, method, options=options, cohort=0)
    for number, (x, _) in enumerate(tests):
        model = run.client(OWNERS[number])
        found = logits(model, x).softmax(1).double()
        if method.startswith("superfed"):
            assert torch.allclose(found, model.predict(x).probabilities, atol=1e-6)
        else:  # draws around the mean: more of them do not move it
            assert float((found - model.predict(x).probabilities).abs().max()) < 0.1
            variance = torch.cat([v.reshape(-1) for v in model.posterior["variance"].values()])
            assert 0 < int((variance > 0).sum()) < len(variance)


def test_draws_have_the_posteriors_moments(tmp_path):
    run, _ = trained(tmp_path, "fedvi")
    model = run.client(107)
    draws, posterior = model.sample(2000), model.posterior
    for name, mean in posterior["mean"].items():
        stacked, variance = torch.stack([draw[name] for draw in draws]), posterior["variance"][name]
        error = (stacked.mean(0) - mean) / (variance / 2000).sqrt()
        assert float(error.abs().max()) < 5
        assert torch.allclose(stacked.var(0), variance, rtol=0.2)
    assert torch.equal(model.sample(1)[0][name], draws[0][name])
    assert not torch.equal(model.sample(1, seed=1)[0][name], draws[0][name])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["fedpop", "em-tdamp"])
def test_a_family_with_other_fields_has_a_mean_and_draws(tmp_path, method):
    run, _ = trained(tmp_path, method)
    model = run.client(7)
    assert {"mean"} < model.posterior.keys()
    (draw,) = model.sample(1)
    model.module().load_state_dict(draw)


def test_predicting_again_or_in_two_halves_gives_the_same_draws(tmp_path):
    run, tests = trained(tmp_path, "fedvi")
    (x, _), model = tests[0], run.client(7)
    whole = model.predict(x).draws
    assert torch.equal(model.predict(x).draws, whole)
    assert torch.allclose(
        torch.cat([model.predict(x[:2]).draws, model.predict(x[2:]).draws], 1), whole
    )
    assert model.predict(x[:0]).draws.shape == (3, 0, 3)


def test_predictions_do_not_depend_on_the_order_of_the_samples_in_memory(tmp_path):
    run, _ = trained(tmp_path, "fedvi")
    x, model = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32), run.client(7)
    assert torch.equal(model.predict(np.asfortranarray(x)).draws, model.predict(x).draws)


def test_a_file_has_no_other_clients_ids_and_nothing_to_unpickle(tmp_path):
    run, _ = trained(tmp_path, "fedper")
    path = run.client(107).save(tmp_path / "model.safetensors")
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["bflcore"])
    assert [client["id"] for client in header["data"]["clients"]] == [0, 107, 2]
    assert [client["train"] for client in header["data"]["clients"]][::2] == [0, 0]
    assert str(tmp_path) not in json.dumps(header)
    assert not list(tmp_path.glob(".*"))


def test_a_file_is_complete_or_not_there(tmp_path):
    run, _ = trained(tmp_path)
    with pytest.raises(bflcore.RunError, match="model.safetensors cannot be written"):
        run.client(7).save(tmp_path / "nowhere" / "model.safetensors")
    assert not (tmp_path / "nowhere").exists()


def test_another_file_is_refused_in_one_line(tmp_path):
    text, other = tmp_path / "text", tmp_path / "other.safetensors"
    text.write_text("no tensors")
    save_tensors(other, {"w": torch.zeros(1)}, {})
    save_file({"w": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    for path, message in (
        (text, "cannot be read"),
        (other, "is not a model; allowed: a file that bfl export wrote"),
        (tmp_path / "foreign.safetensors", "has no digest"),
        (tmp_path / "absent", "cannot be read"),
    ):
        with pytest.raises(bflcore.RunError, match=message) as error:
            bflcore.load_model(path)
        assert "\n" not in str(error.value)


def test_a_component_that_is_not_installed_is_named(tmp_path):
    run, _ = trained(tmp_path)
    path = run.client(7).save(tmp_path / "model.safetensors")
    header, tensors, _ = read_tensors(path)
    header["settings"]["inference"]["name"] = "absent"
    save_tensors(path, tensors, header)
    with pytest.raises(bflcore.OptionError, match="inference absent is not installed; install"):
        bflcore.load_model(path)


def test_a_network_of_the_users_own_must_be_importable(tmp_path, monkeypatch):
    (tmp_path / "ownnets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run, tests = trained(tmp_path, model="ownnets:build", options={})
    expected = run.client(7).predict(tests[0][0]).probabilities
    path = run.client(7).save(tmp_path / "model.safetensors")
    assert torch.equal(bflcore.load_model(path).predict(tests[0][0]).probabilities, expected)
    monkeypatch.delitem(sys.modules, "ownnets")
    (tmp_path / "ownnets.py").unlink()
    with pytest.raises(bflcore.OptionError, match="there is no module ownnets") as error:
        bflcore.load_model(path)
    assert "\n" not in str(error.value)


def test_a_device_that_is_not_there_is_refused_in_one_line(tmp_path):
    run, _ = trained(tmp_path)
    path = run.client(7).save(tmp_path / "model.safetensors")
    for load in (
        lambda: bflcore.load_model(path, "cuda:99"),
        lambda: bflcore.load(run.path, "xpu:9").client(7),
    ):
        with pytest.raises(bflcore.OptionError, match="--device: .* is not available here"):
            load()


def test_a_network_of_float64_predicts_in_float64(tmp_path):
    run, tests = trained(tmp_path, dtype="float64", data=table())
    model = run.client(7)
    assert model.module().state_dict().popitem()[1].dtype == torch.float64
    x = tests[0][0].astype(np.float64)
    assert model.predict(x).draws.dtype == torch.float64
