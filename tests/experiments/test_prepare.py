"""From settings to a problem."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bflcore import DataError, Map, OptionError
from bflcore.data.leaf import CHARACTERS
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.problem.calibration.conformal import Conformal
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


def test_calibration_samples_are_cut_off_and_described():
    whole, cut = prepared(), prepared({"calibration_fraction": 0.25})
    assert whole.problem.calibration is None
    assert whole.problem.calibrators == ()
    assert torch.equal(cut.problem.test.x, whole.problem.test.x)
    assert [one.name for one in cut.problem.calibrators] == ["temperature", "conformal", "ood"]
    for client in whole.problem.clients:
        of = cut.problem
        assert of.calibration.size(client) == cut.description.clients[client].calibration == 4
        found = samples(of.train, client) | samples(of.calibration, client)
        assert found == samples(whole.problem.train, client)


def test_a_calibrator_for_another_task_is_refused(monkeypatch):
    monkeypatch.setattr(Conformal, "tasks", ("regression",))
    with pytest.raises(OptionError, match="--calibrate: conformal is for regression, but synthe"):
        prepared({"calibration_fraction": 0.25})


def test_a_calibration_split_that_no_client_has_samples_for_is_one_line():
    data = {"data": "digits", "partition": "iid", "clients": 1797}
    with pytest.raises(DataError, match="--calibration-fraction: no client has two training"):
        prepared(data | {"calibration_fraction": 0.5}, dataset={})


OWNERS = np.repeat([900, 7, 107], 20)


def hospitals(path, **arrays):
    """Write three owners' samples: two columns of different scale, three classes."""
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(size=(60, 2)) * [1, 1e5], "y": np.arange(60) % 3, "client": OWNERS}
    np.savez(path, **given | arrays)
    return str(path)


def of_own(path, **flags):
    data = {"data": str(path)} | flags.pop("data", {})
    return prepare(resolve(load_registry(), "fedavg", {}, {"data": data} | flags))


def test_own_data_with_owners_are_divided_by_owner_unless_it_is_chosen(tmp_path):
    path = hospitals(tmp_path / "a.npz")
    found = of_own(path)
    assert [client.id for client in found.description.clients] == [7, 107, 900]
    assert (found.experiment.partition.name, found.experiment.data.clients) == ("natural", 3)
    assert any("natural, the 3 owners are the clients; --partition iid" in n for n in found.notes)
    mixed = of_own(path, data={"partition": "iid", "clients": 4})
    assert mixed.problem.clients == (0, 1, 2, 3)
    assert any("iid does not use the 3 owners" in note for note in mixed.notes)
    some = of_own(path, data={"clients": 2})
    assert any(note == "--clients: 2 of 3 owners are used: 7, 107" for note in some.notes)
    # Stored values count as chosen: the experiment repeats itself.
    again = prepare(resolve(load_registry(), "fedavg", found.experiment.as_toml(), {}))
    assert again.experiment.as_toml() == found.experiment.as_toml()


def test_natural_takes_all_owners_of_any_data_set():
    data = {"data": "synthetic", "partition": "natural"}
    found = prepare(resolve(load_registry(), "fedavg", {}, {"data": data}))
    assert len(found.problem.clients) == 30


def test_own_data_without_owners_are_divided_among_ten_clients(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 2)), y=np.arange(60) % 3)
    found = of_own(tmp_path / "a.npz")
    assert (found.experiment.partition.name, found.experiment.data.clients) == ("iid", 10)


def test_owners_of_test_samples_are_tested_on_their_own(tmp_path):
    rng = np.random.default_rng(1)
    tests = {"x_test": rng.normal(size=(9, 2)), "y_test": np.arange(9) % 3}
    known = tests | {"client_test": np.array([7] * 6 + [900] * 2 + [107])}
    found = of_own(hospitals(tmp_path / "a.npz", **known)).description
    assert [(client.id, client.test) for client in found.clients] == [(7, 6), (107, 1), (900, 2)]
    unknown = of_own(hospitals(tmp_path / "a.npz", **tests))
    assert any(note.startswith("client_test is missing") for note in unknown.notes)


def test_the_likelihood_decides_the_task(tmp_path):
    path = hospitals(tmp_path / "a.npz")
    found = of_own(path, likelihood={"name": "gaussian"})
    assert found.problem.likelihood.task == found.description.task == "regression"
    assert found.problem.train.y.shape[1:] == (1,)
    assert of_own(path, data={"task": "regression"}).problem.likelihood.name == "gaussian"
    with pytest.raises(OptionError, match="--task: classification does not fit --likelihood gau"):
        of_own(path, likelihood={"name": "gaussian"}, data={"task": "classification"})


def test_paths_are_stored_so_that_they_hold_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hospitals(Path("a.npz"))
    stored = of_own("a.npz").experiment.as_toml()["data"]
    assert stored["data"] == str(tmp_path / "a.npz")


def table(path, rows=400, seed=0):
    """Write a table of three owners with strings and missing values; return it as a data frame."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(seed)
    age = np.where(rng.random(rows) < 0.2, np.nan, rng.normal(60, 15, rows))
    frame = pandas.DataFrame({
        "age": age,
        "bnp": rng.normal(1e5, 3e4, rows),
        "ward": rng.choice(["icu", "er", "gp"], rows),
        "hospital": rng.choice(["ukb", "lmu", "ukm"], rows),
        "outcome": rng.choice(["mild", "severe"], rows, p=[0.9, 0.1]),
    })  # fmt: skip
    frame.to_csv(path, index=False)
    return frame


TABLE = {"target": "outcome", "client": "hospital"}


def answered(prepared):
    """Return the problem after the clients' answers, each asked alone."""
    problem = prepared.problem
    answers = [problem.moments(client) for client in problem.clients]
    sums = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    return problem.surveyed(sums)


def test_what_clients_answer_scales_a_table_as_its_pooled_training_samples(tmp_path):
    frame = table(tmp_path / "a.csv")
    found = of_own(tmp_path / "a.csv", data=TABLE)
    train = np.concatenate(found.partition.train)
    numbers = frame[["age", "bnp"]].to_numpy(np.float32).astype(np.float64)
    expected = (numbers - np.nanmean(numbers[train], 0)) / np.nanstd(numbers[train], 0)
    assert found.description.schema.features[:3] == ("age", "age is missing", "bnp")
    for shares, parts in (
        (answered(found).train, found.partition.train),
        (answered(found).test, found.partition.test),
    ):
        for client, rows in enumerate(parts):
            x = shares.of(client)[0].numpy()
            np.testing.assert_allclose(x[:, [0, 2]], np.nan_to_num(expected[rows]), atol=1e-4)
            np.testing.assert_array_equal(x[:, 1], np.isnan(numbers[rows, 0]))
            wards = frame["ward"].iloc[rows].to_numpy()[:, None] == np.array(["er", "gp", "icu"])
            np.testing.assert_array_equal(x[:, 3:], wards)


def test_no_test_sample_influences_how_a_table_is_encoded_and_scaled(tmp_path):
    frame = table(tmp_path / "a.csv")
    before = of_own(tmp_path / "a.csv", data=TABLE)
    tests = np.concatenate(before.partition.test)
    frame.loc[tests, "bnp"] *= 1000
    frame.loc[tests, "age"] = np.nan
    frame.loc[tests, "ward"] = "palliative"
    frame.to_csv(tmp_path / "a.csv", index=False)
    after = of_own(tmp_path / "a.csv", data=TABLE)
    assert after.description.schema == before.description.schema
    assert torch.equal(after.problem.initial, before.problem.initial)
    for client in before.problem.clients:
        ours, theirs = (answered(of).train.of(client)[0] for of in (after, before))
        assert torch.equal(ours, theirs)
    unseen = answered(after).test.of(0)[0]
    assert not unseen[:, 3:].any()


def test_a_category_of_clients_that_do_not_train_is_unseen(tmp_path):
    frame = table(tmp_path / "a.csv")
    frame.loc[frame["hospital"] == "ukm", "ward"] = "hospice"
    frame.to_csv(tmp_path / "a.csv", index=False)
    found = of_own(tmp_path / "a.csv", data=TABLE | {"novel_clients": 1})
    assert found.description.schema.features[3:] == ("ward=er", "ward=gp", "ward=icu")


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
    for name, one in found.problem.samples.items():
        assert torch.equal(one.x, without.problem.samples[name].x)


def test_foreign_samples_that_are_the_data_themselves_or_unknown_are_refused():
    with pytest.raises(OptionError, match="--ood: digits is the data set itself"):
        beside("digits", "digits")
    with pytest.raises(OptionError, match="nonsense"):
        beside("digits", "nonsense")


@pytest.mark.parametrize("hidden", [(10**9,), (10**9, 10**9), (10**18,)])
def test_a_network_that_does_not_fit_in_memory_is_refused_before_it_is_built(hidden):
    flags = {"data": {"data": "digits"}, "model": {"name": "mlp", "hidden": hidden}}
    with pytest.raises(OptionError, match="^model mlp: .*; choose a smaller network") as failure:
        prepare(resolve(load_registry(), "fedavg", {}, flags))
    assert "\n" not in str(failure.value)


def test_a_device_that_holds_no_values_is_refused():
    flags = {"data": {"data": "digits"}, "device": "meta"}
    with pytest.raises(OptionError, match="--device: 'meta' is not available here; allowed: cpu"):
        prepare(resolve(load_registry(), "fedavg", {}, flags))
