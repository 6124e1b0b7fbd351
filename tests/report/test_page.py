"""The page of a finished run when clients lack test samples, or a figure that others have."""

import json

import attrs
import numpy as np
import pytest

from bflcore.cli import main
from bflcore.data.partition import Natural
from bflcore.report import write_report
from bflcore.report.page import _clients
from bflcore.report.reading import read_run

SIZES = (12, 9, 1)  # the last client's only sample trains: it has none to test on


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a method on clients of `SIZES` samples; return its folder."""

    def assign(partition, dataset, clients, rng):
        return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])

    monkeypatch.setattr(Natural, "assign", assign)

    def of(targets, *words):
        x = np.random.default_rng(0).normal(size=(sum(SIZES), 3)).astype(np.float32)
        np.savez(tmp_path / "data.npz", x=x, y=targets)
        given = ("--data", tmp_path / "data.npz", "--partition", "natural", "--clients", "3")
        quick = ("--rounds", "1", "--local-epochs", "1", "--workers", "1", "--quiet")
        small = ("--model", "mlp", "-o", "model.hidden=4")
        with pytest.raises(SystemExit) as end:
            main([*map(str, ("run", *words, *given, *quick, *small, "--out", tmp_path / "run"))])
        assert end.value.code == 0
        return tmp_path / "run"

    return of


@pytest.mark.parametrize("words", [("fedavg",), ("superfed-mm", "--cohort", "3")])
def test_a_client_without_test_samples_is_left_out_of_the_page(run, words):
    folder = run(np.arange(sum(SIZES)) % 4, *words)
    detail = json.loads((folder / "evaluation.json").read_text())
    assert [client["client"] for client in detail["personal"]["clients"]] == [0, 1]
    assert (folder / "report.html").exists()


def test_a_run_that_nobody_can_test_says_so(run):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg", "--train-per-class", "12")
    assert "No client could be evaluated" in (folder / "report.html").read_text()


def test_a_figure_that_one_client_lacks_is_a_dash_and_ranks_last(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    clients = [{"client": 7, "examples": 0}, *read.evaluation["personal"]["clients"]]
    personal = read.evaluation["personal"] | {"clients": clients}
    shown = _clients(attrs.evolve(read, evaluation={"personal": personal}))
    assert shown.count("<td>-</td>") == 4
    assert shown.rindex("<td>7</td><td>0</td>") > shown.rindex("<td>1</td>")


def test_targets_that_do_not_vary_at_a_client_leave_its_page_whole(run):
    targets = np.linspace(0, 1, sum(SIZES), dtype=np.float32)
    targets[: SIZES[0]] = 0.5
    folder = run(targets, "fedavg")
    first, second = json.loads((folder / "evaluation.json").read_text())["personal"]["clients"]
    assert "nmse" in second
    assert "nmse" not in first
    assert f"<td>{second['nmse']:.4f}</td>" in write_report([folder]).read_text()
