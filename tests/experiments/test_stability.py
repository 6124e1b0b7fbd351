"""Stability: posteriors that the data cannot explain, and honest ones that are left alone."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch

from bflcore import Broadcast, Fixed, Gaussian, Point, Variational
from bflcore.aggregation import Average
from bflcore.errors import RoundError, RunWarning
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import execute
from bflcore.experiments.stability import Stability, extremes
from bflcore.messages import SURVEY
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe
from bflcore.weighting import Examples

from ..interrupted import Killed, stopped_at

RECIPE = Recipe(Variational(), Average(), Examples(), Fixed())


def posterior(mean, variance):
    return Gaussian(torch.tensor(mean), torch.tensor(variance))


def bounds(start, prior=None, examples=99):
    survey = {f"{SURVEY}examples": torch.tensor(examples)}
    return Stability.of(RECIPE, Broadcast(0, start, prior or start, survey))


FIRST = posterior([0.5, -3.0], [1.0, 4.0])


def test_extremes_leave_out_parameters_that_are_certain():
    found = extremes(posterior([0.5, -3.0, 2.0], [0.0, 4.0, 0.25]))
    assert found == {"smallest_variance": 0.25, "largest_variance": 4.0, "largest_mean": 3.0}
    assert extremes(Point(torch.tensor([1.0, -2.0]))) == {"largest_mean": 2.0}
    assert extremes(posterior([], [])) == {}


@pytest.mark.parametrize(
    ("beyond", "within", "quantity"),
    [
        # 99 samples in a round: 100 (1 + 99) = 10,000 times the first variances, and
        # 3 + sqrt(4 * 10,000) = 203 for the means.
        ([0.0, 0.9e-4], [0.0, 1.1e-4], "smallest_variance"),
        ([0.0, 4.1e4], [0.0, 3.9e4], "largest_variance"),
        ([204.0, 1.0], [202.0, 1.0], "largest_mean"),
    ],
)
def test_an_extreme_beyond_what_the_data_explain_is_found(beyond, within, quantity):
    def found(mean, variance, number):
        after = posterior([mean, 1.0], [1.0, variance])
        return [e["quantity"] for e in bounds(FIRST).excesses(number, extremes(after))]

    assert found(*beyond, 1) == [quantity]
    assert found(*within, 1) == []
    assert found(*beyond, 2) == []  # two rounds may count the samples twice


def test_bounds_are_over_the_start_and_the_prior():
    wide = bounds(FIRST, posterior([0.0, 0.0], [0.25, 100.0]))
    assert wide.first == {"smallest_variance": 0.25, "largest_variance": 100.0, "largest_mean": 3.0}


def test_a_point_has_no_bounds():
    points = bounds(Point(torch.tensor([0.1])))
    assert points.excesses(1, extremes(Point(torch.tensor([1e9])))) == []
    said = points.growth(Point(torch.tensor([1e9])))
    assert said.endswith("the largest |mean| of the server's posterior has grown from 0.1 to 1e+09")


def test_what_has_changed_most_is_named_and_small_changes_are_not():
    after = posterior([300.0, 1.0], [1.0, 1e-9])
    said = bounds(FIRST).growth(after)
    assert said == (
        "under aggregator average and hyper fixed the smallest variance of the server's posterior "
        "has shrunk from 1 to 1e-09"
    )
    assert bounds(FIRST).growth(posterior([30.0, 1.0], [0.1, 40.0])) == ""


def settings(**more):
    data = {"data": "synthetic", "partition": "natural", "clients": 10}
    flags = {
        "data": data,
        "rounds": 14,
        "eval_every": 7,
        "dataset": {"owners": 10, "samples": 12, "features": 4, "classes": 2},
        "model": {"name": "mlp", "hidden": (3,)},
        "inference": {"local_epochs": 1},
        "engine": {"workers": 1},
    }
    return prepare(resolve(load_registry(), "fedvi", {}, flags | more))


def run(path, prepared):
    """Return the warnings of a run, and the run's summary."""
    directory = path if isinstance(path, RunDirectory) else None
    directory = directory or RunDirectory.create(path, prepared, load_registry())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        summary = execute(prepared, directory)
    return [str(one.message) for one in caught if one.category is RunWarning], summary


def test_a_collapse_is_reported_when_it_begins_and_again_at_the_end(tmp_path, monkeypatch):
    prepared = settings(aggregator={"name": "conflation"})
    said, summary = run(tmp_path / "whole", prepared)
    (excess,) = summary["unstable"]
    began = excess["round"]
    assert excess["quantity"] == "smallest_variance"
    assert 5 <= began <= 10
    assert re.match(
        rf"round {began}: under aggregator conflation and hyper fixed the smallest variance of the "
        r"server's posterior has shrunk from 0\.0024 to \S+, more than \d+ samples can explain; ",
        said[0],
    )
    assert said[1].startswith(f"unstable from round {began} on: under aggregator conflation")
    assert len(said) == 2
    lines = [json.loads(x) for x in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [bool(line["unstable"]) for line in lines] == [began <= 7, True]
    assert lines[-1]["posterior.smallest_variance"] <= excess["value"]
    # A run that is resumed later remembers in which round it began.
    cut = RunDirectory.create(tmp_path / "cut", prepared, load_registry())
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopped_at(patch, (Checkpoints, "write"), began + 3)
        with pytest.raises(Killed):
            execute(prepared, cut)
    again, resumed = run(cut, prepare(prepared.experiment))
    assert resumed["unstable"] == summary["unstable"]
    assert again == said[1:]


def test_a_run_that_diverges_ends_with_the_rule_and_what_grew(tmp_path):
    wild = {"lr": 0.01, "initial_sigma": 0.1, "prior_sigma": 0.1}
    data = {"data": "digits", "clients": 10, "train_per_class": 3, "test_per_class": 1}
    prepared = settings(
        aggregator={"name": "weight-consolidation"},
        inference={"local_epochs": 20, **wild},
        model={"name": "mlp", "hidden": (10,)},
        dataset={},
        data=data,
        rounds=60,
    )
    directory = RunDirectory.create(tmp_path / "run", prepared, load_registry())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RoundError) as failure:
            execute(prepared, directory)
    rule = "under aggregator weight-consolidation and hyper fixed"
    assert re.search(
        rf"gave a valid result.*; {rule} the .* has (grown|shrunk) from \S+ to \S+ by round",
        str(failure.value),
    )
    said = [str(one.message) for one in caught if one.category is RunWarning]
    assert any(f"{rule} the largest |mean| of" in text for text in said)


@pytest.mark.parametrize("method", ["fedvi", "bpfed", "fedsi", "pfedbayes", "em-tdamp", "fedavg"])
def test_honest_methods_are_not_warned_of(tmp_path, method):
    data = {"data": "digits", "clients": 5, "train_per_class": 3, "test_per_class": 1}
    flags = {"rounds": 4, "data": data, "engine": {"workers": 1}, "model": {"hidden": (10,)}}
    prepared = prepare(resolve(load_registry(), method, {}, flags))
    said, summary = run(tmp_path / "run", prepared)
    assert (said, summary["unstable"]) == ([], [])
