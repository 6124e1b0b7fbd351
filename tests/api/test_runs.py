"""A finished run is used without its data: what it predicts is what was evaluated."""

from __future__ import annotations

import json
import math
import os
import shutil
import tomllib

import numpy as np
import pytest
import torch

import bflcore
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.environment import settings_digest
from bflcore.experiments.integrity import read_json, write_json
from bflcore.options import options_of
from bflcore.problem import metrics

from ..interrupted import METHODS, Killed, inference_of, same, stopped_at

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
    folder.mkdir(exist_ok=True)
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
    adapted = loaded.adapt(x, y)
    assert bool(adapted.predict(x).probabilities.isfinite().all())
    adapted.module()


PRIOR = {"likelihood.label_prior": 2.0}
FLAGS = {"likelihood": "categorical", "cohort": 0}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["fedavg", "bpfed", "fedsi", "fedpop", "mc-dropout"])
def test_a_model_with_a_label_prior_predicts_without_the_data_as_evaluated(tmp_path, method):
    data = table()
    # Each owner lacks a class; a stranger's counts are those of its own samples.
    keep = data["y"] != data["client"] % CLASSES
    data = {name: values[keep] for name, values in data.items()}
    run, tests = trained(
        tmp_path, method, data, options_for(method) | PRIOR, novel_clients=1, **FLAGS
    )
    found = evaluated(run) | evaluated(run, "novel")
    loaded = bflcore.load(run.path)
    for number, (x, y) in enumerate(tests):
        expected = found[number]["accuracy"], found[number]["nll"]
        model = loaded.client(OWNERS[number])
        assert accuracy_and_nll(model.predict(x), y) == expected
        again = bflcore.load_model(model.save(tmp_path / f"{number}.safetensors"))
        assert accuracy_and_nll(again.predict(x), y) == expected
        other = model.assuming("uniform")
        changed = other.predict(x).probabilities
        assert not torch.allclose(changed, model.predict(x).probabilities)
        moved = bflcore.load_model(other.save(tmp_path / "other.safetensors"))
        assert torch.equal(moved.predict(x).probabilities, changed)
    rows = rows_of(run, 2)
    adapted = loaded.adapt(data["x"][rows], data["y"][rows])
    counts = np.bincount(data["y"][rows], minlength=CLASSES)
    assert adapted.memory["label_counts"].tolist() == counts.tolist()
    assert adapted.bound.offset.equal(loaded.client(900).bound.offset)


def test_the_servers_model_has_the_label_prior_of_all_clients(tmp_path):
    run, tests = trained(tmp_path, "fedavg", None, options_for("fedavg") | PRIOR, **FLAGS)
    found = evaluated(run, "global")
    for number, (x, y) in enumerate(tests):
        expected = found[number]["accuracy"], found[number]["nll"]
        assert accuracy_and_nll(run.server.predict(x), y) == expected
    pooled = run.client(7).assuming("pooled")
    assert torch.equal(pooled.predict(x).probabilities, run.server.predict(x).probabilities)


def test_a_model_without_a_label_prior_assumes_none_in_one_line(tmp_path):
    run, _ = trained(tmp_path)
    with pytest.raises(bflcore.OptionError, match=r"--label-prior: .* trained without one.*leave"):
        run.client(7).assuming("uniform")


def test_a_server_whose_model_is_complete_predicts_as_it_was_evaluated(tmp_path):
    run, tests = trained(tmp_path, "fedavg", cohort=0)
    found = evaluated(run, "global")
    x, y = (np.concatenate(part) for part in zip(*tests, strict=True))
    hits = sum(round(entry["accuracy"] * entry["examples"]) for entry in found.values())
    assert int((run.server.predict(x).labels == torch.as_tensor(y)).sum()) == hits
    copied = bflcore.load_model(run.server.save(tmp_path / "server.safetensors"))
    assert torch.equal(copied.predict(x).probabilities, run.server.predict(x).probabilities)


def test_a_server_without_heads_has_no_model_in_one_line(tmp_path):
    run, _ = trained(tmp_path, share="body")
    with pytest.raises(bflcore.RunError, match="not complete, clients keep a part of it; use"):
        _ = run.server


def test_a_regression_predicts_in_the_units_of_its_targets(tmp_path):
    flags = {"clients": 3, "rounds": 2, "workers": 1, "model": "mlp", "out": tmp_path / "run"}
    run = bflcore.run("fedvi", data="boston", options={"model.hidden": (5,)}, **flags)
    from bflcore.data.sources import Boston

    data = Boston().load()
    with np.load(run.path / "partition.npz") as file:
        tests = np.split(file["test"], file["test_sizes"].cumsum()[:-1])
    model = run.client(1)
    prediction = model.predict(data.x[tests[1]])
    y = torch.as_tensor(data.y[tests[1]])
    error = float((prediction.mean - y).square().mean().sqrt())
    deviation = float(model.problem.train.scaling.y[1])
    assert math.isclose(error, evaluated(run)[1]["rmse"] * deviation, rel_tol=1e-5)
    lower, upper = prediction.interval(0.5)
    inside = float(((lower <= y) & (y <= upper)).double().mean())
    assert inside == evaluated(run)[1]["coverage50"]
    assert torch.allclose(prediction.std**2, prediction.aleatoric + prediction.epistemic)
    assert torch.allclose(prediction.draws.mean(0), prediction.mean)
    assert np.allclose(prediction.mean.mean(), data.y.mean(), rtol=0.5)


@pytest.mark.parametrize("form", ["bytes in [0, 1]", "bytes in [-1, 1]"])
def test_images_are_given_as_bytes_as_they_were_in_the_file(tmp_path, form):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 1, 4, 4), dtype=np.uint8)
    data = {"x": x, "y": np.arange(60) % 3, "client": np.repeat(OWNERS, 20)}
    given = {"input_range": "-1,1"} if form.endswith("[-1, 1]") else {}
    run, tests = trained(tmp_path, data=data, options={"model.hidden": (5,)}, **given)
    for number, (images, y) in enumerate(tests):
        found = evaluated(run)[number]
        prediction = run.client(OWNERS[number]).predict(images)
        assert accuracy_and_nll(prediction, y) == (found["accuracy"], found["nll"])
        floats = run.client(OWNERS[number]).predict(images.astype(np.float32) / np.float32(255))
        assert torch.equal(floats.probabilities, prediction.probabilities)


def rows_of(run, number, kind="train"):
    with np.load(run.path / "partition.npz") as file:
        return np.split(file[kind], file[f"{kind}_sizes"].cumsum()[:-1])[number]


@pytest.mark.parametrize("method", ["fedper", "fedavg-ft", "fedvi"])
def test_a_stranger_adapts_as_the_held_out_client_did_in_the_evaluation(tmp_path, method):
    data, share = table(), {"share": "body"} if method == "fedvi" else {}
    run, _ = trained(tmp_path, method, data=data, novel_clients=1, cohort=0, **share)
    held_out = run.client(900).module().state_dict()
    assert run.client(900).novel
    rows = rows_of(run, 2)
    other = run.adapt(data["x"][rows], data["y"][rows])
    assert (other.id, other.number) == ("new", 3)
    # The number decides the order of the minibatches: leave the last client out of the run.
    path = run.path / "data.json"
    described = read_json(path)
    described["clients"].pop()
    write_json(path, described)
    same = bflcore.load(run.path).adapt(data["x"][rows], data["y"][rows]).module().state_dict()
    assert all(torch.equal(same[name], tensor) for name, tensor in held_out.items())
    index = json.loads((run.path / "models" / "index.json").read_text())
    assert index["clients"]["2"] == "own"  # it has learnt


def test_labels_are_checked_before_a_stranger_adapts(tmp_path):
    run, _ = trained(tmp_path)
    x = np.zeros((2, FEATURES))
    with pytest.raises(bflcore.DataError, match="other labels than the run; allowed: 0, 1, 2"):
        run.adapt(x, [0, 3])
    with pytest.raises(bflcore.DataError, match="x has 2 samples, y has 1"):
        run.adapt(x, [0])


def test_a_client_without_test_samples_has_a_model_too(tmp_path):
    data = table()
    keep = np.r_[0:50, 50:51]  # the last owner has one sample, which it trains on
    with pytest.warns(UserWarning, match="clients without test samples, which are not .*: 900"):
        run, _ = trained(tmp_path, "fedbabu", data={name: a[keep] for name, a in data.items()})
    assert 2 not in evaluated(run)
    own = run.client(900).module().state_dict()
    other = run.client(7).module().state_dict()
    assert any(not torch.equal(own[name], other[name]) for name in own)


def test_history_and_summary_are_what_the_run_wrote(tmp_path):
    run, _ = trained(tmp_path, eval_every=1)
    assert [record["round"] for record in run.history] == [1, 2]
    assert run.summary["final"]["personal.nll"] == run.history[-1]["personal.nll"]
    pandas = pytest.importorskip("pandas")
    frame = run.history_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["personal.nll.pooled"].tolist() == [
        record["personal.nll"]["pooled"] for record in run.history
    ]


def test_progress_is_printed_if_asked_for_and_nothing_is_otherwise(tmp_path, capsys):
    trained(tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    trained(tmp_path / "loud", progress=True)
    lines = capsys.readouterr().out.splitlines()
    said = [
        "task: classification of 3 classes (y: 0, 1, 2); --task regression takes them as numbers"
    ]
    assert [line.partition("  ")[0] for line in lines] == [*said, "round 1", "round 2"]
    assert "personal.accuracy" in lines[-1]


def test_python_and_the_command_line_give_the_same_run(bfl, tmp_path):
    flags = {"data": "synthetic", "clients": 3, "rounds": 2, "local_epochs": 1, "lr": 0.02}
    words = [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", v)]
    run = bflcore.run(
        "fedvi", out=tmp_path / "a", workers=1, options={"model.hidden": (5, 4)}, **flags
    )
    bfl("run", "fedvi", *words, "--workers", 1, "-o", "model.hidden=5,4", "--out", tmp_path / "b")
    theirs = tmp_path / "b"
    for name in ("experiment.toml", "evaluation.json", "data.json"):
        assert (run.path / name).read_text() == (theirs / name).read_text()
    again = bflcore.run(str(run.path / "experiment.toml"), out=tmp_path / "c")
    assert evaluated(again) == evaluated(run)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bflcore.run("fedavgg"), "unknown method 'fedavgg'.*did you mean fedavg"),
        (lambda: bflcore.run("fedavg", round=3), "unknown flag 'round'.*did you mean rounds"),
        (lambda: bflcore.run("fedavg", rounds=0), "--rounds: 0 is not allowed"),
        (lambda: bflcore.run("fedavg", options={"lr": 1}), "-o: 'lr=1' is not allowed"),
        (lambda: bflcore.load("nowhere"), "nowhere is not a run directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bflcore.BflError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_in_a_run_directory_is_said_in_one_line(tmp_path):
    run, _ = trained(tmp_path)
    with pytest.raises(bflcore.OptionError, match="unknown client '8'.*allowed: 107, 7, 900"):
        run.client(8)
    assert run.client("107").id == run.client(107).id == 107

    def without(name):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(run.path, copy)
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return copy

    with pytest.raises(bflcore.RunError, match="data.json is missing.*earlier version"):
        bflcore.load(without("data.json"))
    with pytest.raises(bflcore.RunError, match="not finished; continue with: bfl resume"):
        bflcore.load(without("summary.json")).client(7)
    with pytest.raises(bflcore.RunError, match="index.json cannot be read.*run the experiment"):
        bflcore.load(without("models")).client(7)
    with pytest.raises(bflcore.RunError, match="has no checkpoint"):
        bflcore.load(without("checkpoint")).client(7)


def test_a_model_that_stays_with_its_client_is_refused_by_name(tmp_path):
    run, _ = trained(tmp_path)
    index = run.path / "models" / "index.json"
    write_json(index, {"round": 2, "clients": {"0": "stored"}})
    loaded = bflcore.load(run.path)
    assert loaded.client(7).number == 0
    with pytest.raises(bflcore.RunError, match="the model of client 900 is not here: it is on the"):
        loaded.client(900)
    write_json(index, {"round": 1, "clients": {}})
    with pytest.raises(bflcore.RunError, match="is of round 1, but the checkpoint is of round 2"):
        bflcore.load(run.path).client(7)


def test_the_loaded_run_needs_neither_the_data_nor_other_parts(tmp_path, monkeypatch):
    """The aggregator, the engine and the loggers of a run may be absent where it is used."""
    run, tests = trained(tmp_path, engine="local")
    path = run.path / "experiment.toml"
    text = path.read_text()
    for part in ("aggregator", "weighting", "hyper", "engine"):
        assert f"[{part}]" in text
        text = text.replace(f"[{part}]\nname = ", f"[{part}]\nname = 'gone' # ")
    text = text.replace('data = "', 'data = "/gone/')
    path.write_text(text)
    known = read_json(run.path / "environment.json")
    known["fingerprints"]["experiment.toml"] = settings_digest(tomllib.loads(text))
    write_json(run.path / "environment.json", known)
    x, y = tests[0]
    found = evaluated(run)[0]
    prediction = bflcore.load(run.path).client(7).predict(x)
    assert accuracy_and_nll(prediction, y) == (found["accuracy"], found["nll"])


def test_uncertainties_are_those_of_the_evaluation(tmp_path):
    run, tests = trained(tmp_path, "fedvi")
    for number, (x, y) in enumerate(tests):
        found, p = evaluated(run)[number], run.client(OWNERS[number]).predict(x)
        for name in ("entropy", "aleatoric", "epistemic", "mutual_information"):
            assert math.isclose(float(getattr(p, name).mean()), found[name], abs_tol=1e-12), name
        sums = metrics.classification_sums(p.draws, torch.as_tensor(y))
        assert metrics.metrics_of(sums)["ece"] == found["ece"]


CALIBRATED = {
    "calibration_fraction": 0.3,
    "cohort": 0,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # caveats of tiny runs
@pytest.mark.parametrize("scope", ["federated", "client", "shrunk"])
@pytest.mark.parametrize("method", ["fedbabu", "fedvi", "fedsi"])
def test_calibrated_predictions_are_those_of_the_evaluation_to_the_bit(tmp_path, method, scope):
    options = options_for(method)
    options |= {f"calibrator.{n}.scope": scope for n in ("temperature", "conformal", "ood")}
    run, tests = trained(tmp_path, method, table(samples=60), options, **CALIBRATED)
    found, before = evaluated(run, "calibrated"), evaluated(run)
    loaded = bflcore.load(run.path)
    for number, (x, y) in enumerate(tests):
        model = loaded.client(OWNERS[number])
        saved = bflcore.load_model(model.save(tmp_path / "model.bfl"))
        assert bool(model.calibration) is (scope != "federated")
        for one in (model, saved):
            prediction = one.predict(x)
            assert prediction.calibrated_by == ("temperature", "conformal", "ood")
            expected = found[number]["accuracy"], found[number]["nll"]
            assert accuracy_and_nll(prediction, y) == expected
            raw = before[number]["accuracy"], before[number]["nll"]
            assert accuracy_and_nll(one.predict(x, calibrated=False), y) == raw
            inside = prediction.contains(0.8)
            assert float(inside.sum()) / len(y) == found[number]["set_size80"]
            hits = inside[torch.arange(len(y)), torch.as_tensor(y)]
            assert float(hits.sum()) / len(y) == found[number]["set_coverage80"]
            flags = prediction.out_of_distribution
            assert float(flags.sum()) / len(y) == found[number]["out_of_distribution"]


def test_novel_and_adapted_clients_and_the_server_calibrate_with_the_total(tmp_path):
    options = options_for("fedavg") | {"calibrator.conformal.scope": "client"}
    run, tests = trained(
        tmp_path, "fedavg", table(samples=60), options, novel_clients=1, **CALIBRATED
    )
    x, y = tests[2]
    total = run.server.broadcast.calibration
    assert total["answered"].tolist() == [0, 1]
    assert evaluated(run, "novel.calibrated")[2]["set_size90"] > 0
    for model in (run.client(900), run.adapt(x, y), run.server):
        assert model.calibration == {}
        conformal = model.predict(x).fitted[1]
        assert conformal.sums["scores"].equal(total["conformal.scores"])
    trained_one = run.client(7).predict(x).fitted[1]
    assert float(trained_one.sums["examples"]) < float(total["conformal.examples"])


def test_intervals_of_a_calibrated_regression_are_in_the_units_of_the_targets(tmp_path):
    rng = np.random.default_rng(0)
    arrays = table(samples=60)
    arrays["y"] = (5 * arrays["x"][:, 0] + 100 + rng.normal(size=180)).astype(np.float32)
    options = options_for("fedvi") | {"dataset.standardise": True}
    run, tests = trained(tmp_path, "fedvi", arrays, options, rounds=3, **CALIBRATED)
    covered = []
    for number, (x, y) in enumerate(tests):
        prediction = run.client(OWNERS[number]).predict(x)
        low, high = prediction.interval(0.8)
        covered += ((low[:, 0] <= torch.as_tensor(y)) & (torch.as_tensor(y) <= high[:, 0])).tolist()
        assert torch.allclose((low + high) / 2, prediction.mean.double(), atol=1e-4)
        inside = evaluated(run, "calibrated")[number]["interval_coverage80"]
        assert np.mean(covered[-len(y) :]) == pytest.approx(inside)
    assert np.mean(covered) > 0.6


def hospitals():
    """Return a table of three owners, one of whom has a single patient."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({
        "age": np.where(rng.random(61) < 0.2, np.nan, rng.normal(60, 15, 61)),
        "ward": rng.choice(["icu", "er"], 61),
        "hospital": ["ukb"] * 40 + ["charité"] * 20 + ["lmu"],
    })  # fmt: skip
    frame["outcome"] = np.where(frame["age"] > 60, "severe", "mild")
    return frame


GIVEN = {"rounds": 2, "workers": 1, "model": "mlp", "options": {"model.hidden": (5,)}}


@pytest.mark.filterwarnings("ignore:clients without test samples")
def test_a_data_frame_is_trained_on_and_predicted_by_name(tmp_path):
    frame, out = hospitals(), tmp_path / "run"
    run = bflcore.run("fedvi", data=frame, target="outcome", client="hospital", out=out, **GIVEN)
    assert run.clients == ["charité", "lmu", "ukb"]
    assert "memory" in (out / "experiment.toml").read_text()
    found = evaluated(run)
    with np.load(out / "partition.npz") as file:
        tests = np.split(file["test"], file["test_sizes"].cumsum()[:-1])
    model = bflcore.load(out).client("ukb")
    again = bflcore.load_model(model.save(tmp_path / "ukb.safetensors"))
    number = {"mild": 0, "severe": 1}
    rows = frame.iloc[tests[2]]
    y = [number[name] for name in rows["outcome"]]
    for one in (model, again):
        for form in (rows, rows[["ward", "age"]].to_dict("records")):
            prediction = one.predict(form)
            assert prediction.classes == ("mild", "severe")
            assert accuracy_and_nll(prediction, y) == (found[2]["accuracy"], found[2]["nll"])


@pytest.mark.filterwarnings("ignore:clients without test samples")
def test_a_run_on_data_from_python_continues_with_the_same_data(tmp_path, monkeypatch):
    frame = hospitals()
    given = {"data": frame, "target": "outcome", "client": "hospital", **GIVEN}
    whole = bflcore.run("fedavg", out=tmp_path / "whole", **given)
    with monkeypatch.context() as patch:
        stopped_at(patch, (RunDirectory, "append"), 1)
        with pytest.raises(Killed):
            bflcore.run("fedavg", out=tmp_path / "cut", **given)
    with pytest.raises(bflcore.DataError, match="are not kept; continue with bflcore.resume"):
        bflcore.resume(tmp_path / "cut")
    with pytest.raises(bflcore.RunError, match="unchanged: the data or its partition changed"):
        bflcore.resume(tmp_path / "cut", frame.assign(age=1.0 * np.arange(61)))
    again = bflcore.resume(tmp_path / "cut", frame)
    same(again.path, whole.path)
    assert bflcore.resume(whole.path, frame).summary == whole.summary
    with pytest.raises(bflcore.OptionError, match="whole knows its file or data set; leave data"):
        bflcore.resume(whole.path, "hospitals.csv")


def test_every_file_of_a_run_has_ordinary_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        run, _ = trained(tmp_path, "fedbabu")
        run.client(7).save(run.path / "model.safetensors")
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(run.path)): oct(path.stat().st_mode & 0o777)
        for path in run.path.rglob("*")
        if path.is_file()
    }
    assert {name for name in modes if name.startswith("checkpoint/")}
    assert {name: mode for name, mode in modes.items() if mode != "0o640"} == {}
