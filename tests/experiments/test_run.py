"""Running an experiment: one that was interrupted gives the same numbers, to the bit."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from bflcore import Average
from bflcore.data import Partition
from bflcore.engines.local import LocalSession
from bflcore.errors import OptionError, RoundError, RunWarning
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import execute
from bflcore.options import options_of
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
