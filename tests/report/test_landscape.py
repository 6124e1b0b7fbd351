"""Landscapes of finished runs, curves of a method's own, and the count of rounds in a problem."""

import json

import numpy as np
import pytest
import torch

from bflcore.cli import main
from bflcore.data.label_noise import Pair
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry
from bflcore.report.landscape import _sides, landscape
from bflcore.report.reading import read_run

TINY = ("--clients", "3", "--rounds", "2", "--local-epochs", "1", "--workers", "1", "--quiet")


@pytest.fixture
def run(tmp_path):
    """A finished `fedavg` run on four separable classes."""
    y = np.arange(60) % 4
    x = (np.eye(4)[y] + 0.1 * np.random.default_rng(0).normal(size=(60, 4))).astype(np.float32)
    np.savez(tmp_path / "blobs.npz", x=x, y=y)
    words = ("run", "fedavg", "--data", tmp_path / "blobs.npz", *TINY, "-o", "model.hidden=4")
    with pytest.raises(SystemExit) as end:
        main([*map(str, words), "--label-noise", "pair:0.3", "--out", str(tmp_path / "run")])
    assert end.value.code == 0
    return tmp_path / "run"


def test_a_plane_goes_through_its_networks_with_the_metrics_they_have(run):
    plane = landscape(read_run(run))
    assert list(plane.marks) == ["client", "initialisation"]
    assert set(plane.metrics) == {"nll", "accuracy"}
    prepared = prepare(resolve(load_registry(), "fedavg", read_run(run).experiment, {}))
    problem = prepared.problem
    x, y = problem.test.of(plane.client)
    outputs = problem.forward(problem.initial[None], x[None])[0]
    exact = float(problem.likelihood.nll(outputs, y).mean())
    for side in (plane.across, plane.up):  # two networks lie on one line, rounding errors apart
        assert side[-1] - side[0] == pytest.approx(plane.across[-1] - plane.across[0])
    # The nearest point of the grid: the loss is continuous.
    across, up = plane.marks["initialisation"]
    row = np.abs(np.array(plane.up) - up).argmin()
    column = np.abs(np.array(plane.across) - across).argmin()
    assert plane.metrics["nll"][row][column] == pytest.approx(exact, rel=0.05)


def test_the_sides_of_a_picture_hold_its_networks_and_ignore_rounding_errors():
    for marks in ([(0.0, 0.0), (5.0, 1e-8)], [(0.0, 1e-8), (5.0, 1.0)], [(3.0, 3.0)]):
        across, up = _sides(marks)
        for side, places in ((across, [a for a, _ in marks]), (up, [b for _, b in marks])):
            extent = max(places) - min(places)
            reach = side[-1] - side[0]
            assert side[0] < min(places)
            assert side[-1] > max(places)
            expected = extent if extent > 1e-6 else max(a for a, _ in marks) - marks[0][0] or 1
            assert reach == pytest.approx(1.6 * expected)


def test_a_run_without_a_checkpoint_says_so(run, capsys):
    for path in (run / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(SystemExit) as end:
        main(["report", str(run), "--landscape"])
    assert end.value.code == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_label_noise_is_stored_and_rebuilt_with_the_run(run):
    experiment = resolve(load_registry(), "fedavg", read_run(run).experiment, {})
    assert experiment.label_noise == Pair(eps=0.3)
    first, second = prepare(experiment).problem, prepare(experiment).problem
    assert torch.equal(first.train.y, second.train.y)
    assert first.rounds == 2


def test_methods_without_curves_leave_none(run):
    assert "curves" not in json.loads((run / "evaluation.json").read_text())
