"""The page of a finished run: what it says, escapes, and leaves out."""

import json
import re
from pathlib import Path

import attrs
import numpy as np
import pytest

from bflcore.cli import main
from bflcore.data.partition import Natural
from bflcore.errors import RunError
from bflcore.report import write_report
from bflcore.report.page import render_page
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


def test_a_metric_that_one_client_lacks_is_a_dash_and_ranks_last(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    clients = [{"client": 7, "examples": 0}, *read.evaluation["personal"]["clients"]]
    personal = read.evaluation["personal"] | {"clients": clients}
    personal |= {name: read.evaluation["personal"][name] for name in ("reliability", "retention")}
    page = render_page([attrs.evolve(read, evaluation={"personal": personal})])
    shown = page[page.index("<h2>Clients") : page.index("<details>")]
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


def test_a_page_says_what_must_not_be_reported_and_names_its_sections(run):
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg") / "report.html").read_text()
    for heading in ("Final metrics", "Best evaluated round", "Calibration", "Selective prediction"):
        assert f"<h2>{heading}</h2>" in page
    assert "chosen on test data: an upper bound, not a result to report." in page
    assert page.count("<svg") == 3
    assert not re.search(r"(src|href)=|url\(['\"]?http|@import", page.replace('xlink:href="#', ""))


def test_texts_of_a_run_are_escaped_and_pictures_are_not(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    reason = "<script>alert('&')</script>"
    dropped = [{"round": 1, "client": 0, "stage": "fit", "reason": reason}]
    summary = read.summary | {"dropped": dropped}
    page = render_page([attrs.evolve(read, summary=summary, path=Path("<b>run"))])
    assert reason not in page
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;" in page
    assert "<b>run" not in page
    assert "<title>&lt;b&gt;run</title>" in page


def test_two_runs_share_a_page(run, tmp_path):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg")
    page = write_report([folder, folder], tmp_path / "both.html").read_text()
    assert "<title>run vs run</title>" in page
    assert page.count("<h2>Clients: run</h2>") == 2


def test_a_page_that_cannot_be_written_is_one_line(run, tmp_path):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg")
    with pytest.raises(RunError, match="--out: .* cannot be written"):
        write_report([folder], tmp_path / "nowhere" / "report.html")


def test_a_best_round_chosen_on_validation_samples_says_so(run):
    flags = ("--validation-fraction", "0.3")
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg", *flags) / "report.html").read_text()
    assert "the best validation.accuracy, chosen on validation data." in page
    assert "The best value was chosen on test data" not in page
    assert "validation accuracy" in page
    assert "run, validation" in page  # a learning curve
