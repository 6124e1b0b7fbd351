"""From settings to a problem."""

import json

import numpy as np
import pytest
import torch

from bflcore import DataError, Map, OptionError
from bflcore.data.leaf import CHARACTERS
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


def samples(shares, client):
    return {tuple(row) for row in shares.of(client)[0].tolist()}


def test_validation_samples_are_cut_off_the_training_samples_and_nothing_else_moves():
    whole, cut = prepared().problem, prepared({"validation_fraction": 0.25}).problem
    assert whole.validation is None
    assert torch.equal(cut.test.x, whole.test.x)
    assert torch.equal(cut.initial, whole.initial)
    for client in whole.clients:
        assert cut.validation.size(client) == 4  # of 16
        assert samples(cut.train, client) | samples(cut.validation, client) == samples(
            whole.train, client
        )
        kept = [
            row
            for row in whole.train.of(client)[0].tolist()
            if tuple(row) in samples(cut.train, client)
        ]
        assert cut.train.of(client)[0].tolist() == kept  # in the order that they had


def test_a_clients_validation_samples_depend_on_nobody_else():
    one = prepared({"validation_fraction": 0.25}).problem
    fewer = prepared({"validation_fraction": 0.25, "clients": 2}).problem
    other = prepared({"validation_fraction": 0.25}, seed=1).problem
    assert samples(one.validation, 1) == samples(fewer.validation, 1)
    assert samples(one.validation, 1) != samples(other.validation, 1)


def test_label_noise_spares_validation_samples():
    data = {"validation_fraction": 0.25}
    clean, noisy = prepared(data), prepared(data | {"label_noise": "symmetric:0.9"})
    assert torch.equal(clean.problem.validation.y, noisy.problem.validation.y)
    assert not torch.equal(clean.problem.train.y, noisy.problem.train.y)


def test_validation_samples_do_not_take_part_in_scaling():
    data = {"data": "boston", "partition": "iid", "validation_fraction": 0.5}
    of = surveyed(Map(), prepared(data, dataset={}).problem)
    train, held = (
        np.concatenate([part.of(client)[0] for client in of.clients])
        for part in (of.train, of.validation)
    )
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-4)
    assert abs(held.mean(0)).max() > 1e-3
    assert abs(held).max() < 100


def test_a_validation_split_that_no_client_has_samples_for_is_one_line():
    data = {"data": "digits", "partition": "iid", "clients": 1797}
    with pytest.raises(DataError, match="--validation-fraction: no client has two training"):
        prepared(data | {"validation_fraction": 0.5}, dataset={})


def test_a_model_of_codes_refuses_other_values_before_the_run():
    lstm = {"name": "stacked-lstm", "hidden": 3}
    with pytest.raises(OptionError, match="model stacked-lstm reads character codes, whole num"):
        prepared(model=lstm)


def leaf_file(path, users):
    """Write samples of Shakespeare: 80 equal characters, the next of which is the same."""
    data = {user: {"x": [80 * c for c in line], "y": list(line)} for user, line in users.items()}
    counts = [len(line) for line in users.values()]
    path.parent.mkdir(parents=True)
    content = {"users": list(data), "num_samples": counts, "user_data": data}
    path.write_text(json.dumps(content), encoding="utf-8")


def test_natural_owners_train_and_test_on_their_own_codes(tmp_path):
    leaf_file(tmp_path / "train" / "a.json", {"OTHELLO": "ab}", "IAGO": "c"})
    leaf_file(tmp_path / "test" / "a.json", {"OTHELLO": "d", "IAGO": "ef"})
    data = {"data": "shakespeare", "data_dir": str(tmp_path), "partition": "natural", "clients": 2}
    flags = {"data": data, "model": {"name": "stacked-lstm", "hidden": 3}}
    of = prepare(resolve(load_registry(), "fedavg", {}, flags)).problem
    held = [
        ["".join(CHARACTERS[code] for code in shares.of(client)[1]) for client in of.clients]
        for shares in (of.train, of.test)
    ]
    assert held == [["c", "ab}"], ["ef", "d"]]  # the smallest name is the first client
    assert torch.equal(of.train.x, of.train.y[:, None].expand(-1, 80).float())


def test_images_are_scaled_to_the_input_range_and_tables_are_refused():
    digits = {"data": "digits", "partition": "iid"}
    plain = prepared(digits, dataset={}).problem
    scaled = prepared(digits | {"input_range": "-1,1"}, dataset={}).problem
    for of, other in ((plain.train, scaled.train), (plain.test, scaled.test)):
        torch.testing.assert_close(other.x, 2 * of.x - 1)
        assert torch.equal(other.y, of.y)
    assert torch.equal(plain.initial, scaled.initial)
    with pytest.raises(OptionError, match="--input-range: -1,1 is for images .* synthetic has"):
        prepared({"input_range": "-1,1"})
    with pytest.raises(OptionError, match="input-range: '0,255'"):
        prepared(digits | {"input_range": "0,255"}, dataset={})


def beside(data, ood, **more):
    """Return a prepared run on `data` with samples unlike them."""
    flags = {"data": data, "ood": ood, "clients": 2, **more}
    return prepare(resolve(load_registry(), "fedavg", {}, {"data": flags}))


def test_foreign_samples_are_scaled_as_the_data_and_belong_to_no_client(tmp_path):
    images, y = np.full((40, 1, 28, 28), 51, np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "own.npz", x=images, y=y)
    np.savez(tmp_path / "other.npz", x=np.full((3, 1, 28, 28), 102, np.uint8))
    own, other = str(tmp_path / "own.npz"), str(tmp_path / "other.npz")
    found = beside(own, other, input_range="-1,1")
    assert found.foreign == other
    assert found.problem.foreign.unique().tolist() == [pytest.approx(2 * 0.4 - 1)]
    without = beside(own, "none", input_range="-1,1")
    assert (without.foreign, without.problem.foreign) == ("", None)
    for one, same in zip(found.problem.samples, without.problem.samples, strict=True):
        assert torch.equal(one.x, same.x)


def test_foreign_samples_that_are_the_data_themselves_or_unknown_are_refused():
    with pytest.raises(OptionError, match="--ood: digits is the data set itself"):
        beside("digits", "digits")
    with pytest.raises(OptionError, match="nonsense"):
        beside("digits", "nonsense")
