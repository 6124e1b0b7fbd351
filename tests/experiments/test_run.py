"""Running an experiment: one that was interrupted gives the same numbers, to the bit."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter

import attrs
import numpy as np
import pytest

from bflcore import Average
from bflcore.data import Partition
from bflcore.engines.local import LocalSession
from bflcore.errors import OptionError, RoundError, RunError, RunWarning
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import evaluation_sample, execute
from bflcore.options import options_of
from bflcore.options.settings import RunSettings
from bflcore.registry.loading import load_registry
from bflcore.testing.problems import Replies

from ..interrupted import (
    METHODS,
    QUICK,
    Killed,
    checkpoint,
    inference_of,
    same,
    stopped_at,
)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_bit_for_bit(tmp_path, monkeypatch, method):
    registry = load_registry()
    known = {field.name for field in options_of(inference_of(method))}
    flags = {
        "rounds": 4,
        "eval_every": 2,
        "cohort": 2,
        "seed": 3,
        "data": {"data": "synthetic", "partition": "natural", "clients": 3},
        "dataset": {"owners": 3, "samples": 20, "features": 6, "classes": 3},
        "model": {"name": "mlp", "hidden": (5,)},
        "inference": {name: value for name, value in QUICK.items() if name in known},
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(registry, method, {}, flags))
    whole = RunDirectory.create(tmp_path / "whole", prepared, registry)
    cut = RunDirectory.create(tmp_path / "cut", prepared, registry)
    execute(prepared, whole)
    with monkeypatch.context() as patch:
        stopped_at(patch, (Checkpoints, "write"), 3)  # the start and two rounds
        with pytest.raises(Killed):
            execute(prepared, cut)
    assert checkpoint(cut.path)[0] == 2
    execute(prepare(resolve(registry, method, {}, flags)), cut)
    same(cut.path, whole.path)


def test_a_run_with_validation_samples_goes_on_bit_for_bit(tmp_path, monkeypatch):
    registry = load_registry()
    flags = {
        "rounds": 4,
        "eval_every": 1,
        "pretrain": 0.5,
        "data": {
            "data": "synthetic",
            "partition": "natural",
            "clients": 3,
            "novel_clients": 1,
            "validation_fraction": 0.25,
        },
        "dataset": {"owners": 3, "samples": 20, "features": 6, "classes": 3},
        "model": {"name": "mlp", "hidden": (5,)},
        "inference": {"local_epochs": 1},
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(registry, "fedavg", {}, flags))
    whole = RunDirectory.create(tmp_path / "whole", prepared, registry)
    cut = RunDirectory.create(tmp_path / "cut", prepared, registry)
    summary = execute(prepared, whole)
    for group in ("validation", "validation.global", "validation.novel"):
        assert f"{group}.nll" in summary["final"]
    assert summary["best"]["chosen"].endswith("chosen on validation data")
    with monkeypatch.context() as patch:
        stopped_at(patch, (Checkpoints, "write"), 3)
        with pytest.raises(Killed):
            execute(prepared, cut)
    stored = Partition.load(cut.path / "partition.npz")
    assert [len(samples) for samples in stored.validation] == [4, 4, 4]
    execute(prepare(resolve(registry, "fedavg", {}, flags)), cut)
    same(cut.path, whole.path)
    flags["data"]["validation_fraction"] = 0.5
    other = prepare(resolve(registry, "fedavg", {}, flags))
    assert "the data or its partition" in str(cut.changes(other, registry))


def test_a_rule_that_gives_nan_ends_the_run_and_once_mended_it_is_resumed(tmp_path, monkeypatch):
    def settings():
        data = {"data": "synthetic", "clients": 3, "train_per_class": 6, "test_per_class": 6}
        flags = {"rounds": 3, "data": data, "engine": {"workers": 1}}
        return prepare(resolve(load_registry(), "fedavg", {}, flags))

    whole = RunDirectory.create(tmp_path / "whole", settings(), load_registry())
    execute(settings(), whole)
    cut = RunDirectory.create(tmp_path / "cut", settings(), load_registry())
    right, calls = Average.finish, iter(range(9))
    with monkeypatch.context() as patch:
        nan = float("nan")
        patch.setattr(
            Average,
            "finish",
            lambda self, state: right(self, state).map(lambda t: t * (nan if next(calls) else 1)),
        )
        with pytest.raises(RoundError, match="^round 2: aggregator average gave an invalid"):
            execute(settings(), cut)
    assert checkpoint(cut.path)[0] == 1
    execute(settings(), cut)
    same(cut.path, whole.path)


@pytest.mark.parametrize("scope", ["federated", "client"])
def test_a_run_that_is_killed_in_the_calibration_goes_on_bit_for_bit(tmp_path, monkeypatch, scope):
    registry = load_registry()
    flags = {
        "rounds": 2,
        "data": {
            "data": "synthetic",
            "partition": "natural",
            "clients": 3,
            "novel_clients": 1,
            "calibration_fraction": 0.3,
        },
        "calibrator": {name: {"scope": scope} for name in ("temperature", "conformal", "ood")},
        "dataset": {"owners": 3, "samples": 40, "features": 6, "classes": 3},
        "model": {"name": "mlp", "hidden": (5,)},
        "inference": {"local_epochs": 1},
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(registry, "fedbabu", {}, flags))
    whole = RunDirectory.create(tmp_path / "whole", prepared, registry)
    cut = RunDirectory.create(tmp_path / "cut", prepared, registry)
    summary = execute(prepared, whole)
    for group in ("calibrated", "novel.calibrated"):
        assert f"{group}.set_coverage90" in summary["final"]
    with monkeypatch.context() as patch:
        stopped_at(patch, (LocalSession, "calibrate"), 0)
        with pytest.raises(Killed):
            execute(prepared, cut)
    assert checkpoint(cut.path)[0] == 1
    execute(prepare(resolve(registry, "fedbabu", {}, flags)), cut)
    same(cut.path, whole.path)
    for name in ("index.json", "000000.safetensors", "000000.calibration.safetensors"):
        one, other = (directory.path / "models" / name for directory in (whole, cut))
        assert one.exists() == other.exists() == (scope == "client" or "calib" not in name)
        assert not one.exists() or one.read_bytes() == other.read_bytes()
    before = summary["bytes"]["up"]
    del flags["calibrator"], flags["data"]["calibration_fraction"]
    plain = prepare(resolve(registry, "fedbabu", {}, flags))
    without = execute(plain, RunDirectory.create(tmp_path / "plain", plain, registry))
    histograms = 2 * (2 * (2048 * 8 + 8) + 93 * 8 + 8)  # two clients train
    assert before - without["bytes"]["up"] == histograms


def test_an_engine_that_does_not_calibrate_is_refused_before_the_first_round(tmp_path):
    registry = load_registry()
    flags = {"data": {"data": "synthetic", "calibration_fraction": 0.3, "clients": 3}}
    prepared = prepare(resolve(registry, "fedavg", {}, flags))
    run = RunDirectory.create(tmp_path / "run", prepared, registry)
    with pytest.raises(OptionError, match="engine local does not calibrate; leave it out"):
        execute(prepared, run, session=Replies())
    assert not run.metrics.exists()


@pytest.mark.parametrize(("rows", "warns"), [((40, 5, 5), True), ((20, 15, 15), False)])
def test_a_client_with_nearly_all_the_weight_is_named_once(tmp_path, rows, warns):
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(50) % 2, client=np.repeat([7, 107, 900], rows))
    data = {"data": str(tmp_path / "a.npz"), "test_fraction": 0.1}
    flags = {"rounds": 3, "data": data, "engine": {"workers": 1}, "model": {"hidden": (4,)}}
    prepared = prepare(resolve(load_registry(), "fedavg", {}, flags))
    directory = RunDirectory.create(tmp_path / "run", prepared, load_registry())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        execute(prepared, directory)
    said = [str(one.message) for one in caught if one.category is RunWarning]
    assert len(said) == warns
    assert all("client 0 holds 8" in text for text in said)


def sampled(tmp_path, name, **more):
    """Return the records, the last evaluation and the clients that each evaluation asked."""
    data = {"data": "synthetic", "partition": "natural", "clients": 8, "novel_clients": 2}
    flags = {
        "rounds": 4,
        "eval_every": 2,
        "seed": 5,
        "data": data,
        "dataset": {"owners": 8, "samples": 10, "features": 4, "classes": 2},
        "model": {"name": "mlp", "hidden": (3,)},
        "inference": {"local_epochs": 1},
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(load_registry(), "fedavg", {}, flags | more))
    directory = RunDirectory.create(tmp_path / name, prepared, load_registry())
    asked, evaluate = [], LocalSession.evaluate

    def noted(self, broadcast, clients):
        asked.append(clients)
        return evaluate(self, broadcast, clients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSession, "evaluate", noted)
        summary = execute(prepared, directory)
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return lines, json.loads((tmp_path / name / "evaluation.json").read_text()), summary, asked


def test_all_evaluations_but_the_last_cover_the_same_sample_of_clients(tmp_path):
    lines, evaluation, summary, asked = sampled(tmp_path, "few", eval_clients=3, rounds=6)
    assert [len(clients) for clients in asked] == [5, 5, 8]  # 3 that train and both novel ones
    assert asked[0] == asked[1]
    assert list(asked[0]) == sorted(asked[0])
    assert asked[0][3:] == (6, 7)
    assert [line["clients"] for line in lines] == [{"evaluated": n, "all": 8} for n in (5, 5, 8)]
    assert [entry["client"] for entry in evaluation["personal"]["clients"]] == [*range(6)]
    chosen = [e for e in evaluation["personal"]["clients"] if e["client"] in asked[0]]
    mean = sum(entry["accuracy"] for entry in chosen) / len(chosen)
    assert lines[-1]["sample.personal.accuracy"]["mean"] == pytest.approx(mean)
    assert not any(name.startswith("sample.") for name in lines[0])
    followed = [line["by_client"]["client"] for line in lines]
    assert followed == [list(asked[0][:3])] * 3  # the same clients in every line, also the last
    assert summary["best"]["chosen"].endswith("of the clients evaluated in all rounds")
    again = sampled(tmp_path, "again", eval_clients=3, rounds=6)
    assert again[3] == asked
    assert [line["personal.nll"] for line in again[0]] == [line["personal.nll"] for line in lines]


def test_a_sample_of_evaluated_clients_changes_nothing_that_is_learnt(tmp_path):
    few, everybody = (sampled(tmp_path, str(n), eval_clients=n) for n in (2, 0))
    assert {len(clients) for clients in everybody[3]} == {8}
    apart = {name for name in few[0][-1] if name.startswith("sample.")}
    apart |= {"seconds", "digest", "by_client"}
    assert len(apart) > 4
    last = {name: value for name, value in few[0][-1].items() if name not in apart}
    assert last == {name: everybody[0][-1][name] for name in last}
    assert few[1]["personal"] == everybody[1]["personal"]


def test_the_seed_decides_who_is_evaluated(tmp_path):
    problem = prepare(resolve(load_registry(), "fedavg", {}, {"data": {"data": "digits"}})).problem
    drawn = {evaluation_sample(attrs.evolve(problem, seed=seed), 4) for seed in range(20)}
    assert len(drawn) > 10
    assert evaluation_sample(problem, 0) == evaluation_sample(problem, 10) == problem.clients


@pytest.mark.parametrize(
    ("given", "asked", "due"),
    [
        ({}, 10, 2),
        ({}, 1, 1),
        ({"min_clients": 1}, 10, 1),
        ({"min_clients": 0}, 10, 0),
        ({"drop_out": 0.5}, 3, 0),
        ({"corrupt": 0.5}, 3, 0),
        ({"drop_out": 0.5, "min_clients": 3}, 3, 3),
    ],
)
def test_one_result_stands_for_all_only_where_nobody_else_was_asked(given, asked, due):
    assert RunSettings(**given).due(asked) == due


def test_a_run_whose_simulated_faults_leave_rounds_empty_ends_as_others_do(tmp_path):
    flags = {"drop_out": 0.7, "eval_clients": 0, "rounds": 12, "eval_every": 12}
    *_, summary, _ = sampled(tmp_path, "run", cohort=3, **flags)
    lost = Counter(entry["round"] for entry in summary["dropped"])
    assert 3 in lost.values()
    assert summary["rounds"] == 12


def test_a_cohort_of_one_needs_one_result(tmp_path):
    assert sampled(tmp_path, "run", cohort=1)[2]["rounds"] == 4


def test_a_run_whose_folder_is_removed_says_so_in_one_line(tmp_path):
    def removed(number, *_):
        if number == 2:
            shutil.rmtree(tmp_path / "run")

    data = {"data": "synthetic", "clients": 3}
    flags = {"rounds": 5, "eval_every": 1, "data": data, "engine": {"workers": 1}}
    prepared = prepare(resolve(load_registry(), "fedavg", {}, flags))
    directory = RunDirectory.create(tmp_path / "run", prepared, load_registry())
    with pytest.raises(RunError, match="run: the run directory was removed while the run was wri"):
        execute(prepared, directory, removed)
    assert not (tmp_path / "run").exists()
