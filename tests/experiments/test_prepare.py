"""From settings to a problem."""

import numpy as np
import pytest
import torch

from bflcore import DataError, Map, OptionError
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry
from bflcore.testing.problems import surveyed

FLAGS = {
    "data": {"data": "synthetic", "partition": "natural", "clients": 3},
    "dataset": {"owners": 3, "samples": 20, "features": 6, "classes": 3},
}


def prepared(data=None, **flags):
    return prepare(
        resolve(
            load_registry(), "fedavg", {}, {**FLAGS, "data": FLAGS["data"] | (data or {}), **flags}
        )
    )


def test_every_client_gets_its_samples_and_the_network_their_shape():
    of = prepared().problem
    assert of.clients == (0, 1, 2)
    assert of.train.x.shape[1:] == (6,)
    sizes = [of.train.size(client) + of.test.size(client) for client in of.clients]
    assert sizes == [20, 20, 20]
    assert of.forward(of.initial[None], of.train.x[None]).shape[-1] == 3


def test_the_seed_decides_the_network_and_nothing_else_of_the_run_does():
    one, again, other = prepared(), prepared(rounds=3), prepared(seed=1)
    assert torch.equal(one.problem.initial, again.problem.initial)
    assert not torch.equal(one.problem.initial, other.problem.initial)


def test_the_likelihood_is_that_of_the_task_unless_chosen():
    assert prepared().experiment.likelihood.name == "categorical"
    regression = prepared(dataset=FLAGS["dataset"] | {"classes": 0})
    assert regression.experiment.likelihood.name == "gaussian"
    with pytest.raises(OptionError, match="--likelihood: gaussian is for regression"):
        prepared(likelihood={"name": "gaussian"})


def test_label_noise_changes_training_labels_alone():
    clean, noisy = prepared(), prepared({"label_noise": "symmetric:0.5"})
    assert torch.equal(clean.problem.test.y, noisy.problem.test.y)
    assert not torch.equal(clean.problem.train.y, noisy.problem.train.y)
    assert torch.equal(clean.problem.train.x, noisy.problem.train.x)


def test_novel_clients_are_held_out_of_training():
    of = prepared({"novel_clients": 1}).problem
    assert len(of.clients) == 2
    assert len(of.novel) == 1
    assert set(of.clients) | set(of.novel) == {0, 1, 2}


def test_features_of_a_table_are_raw_until_the_clients_were_surveyed():
    raw = prepared({"data": "boston", "partition": "iid"}, dataset={}).problem
    assert raw.standardise
    assert raw.train.x.abs().max() > 100
    of = surveyed(Map(), raw)
    x = np.concatenate([of.train.of(client)[0] for client in of.clients])
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-4)


def test_a_folder_and_a_device_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(DataError, match="--data-dir: .* is not a folder"):
        prepared({"data_dir": str(tmp_path / "none")})
    with pytest.raises(OptionError, match="--device: 'cuda:77' is not available"):
        prepared(device="cuda:77")
