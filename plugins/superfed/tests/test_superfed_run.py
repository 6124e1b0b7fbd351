"""SuPerFed from the command line: combinations with other parts, outputs, and refusals."""

import json

import numpy as np
import pytest

from bflcore.cli import main

TINY = [
    *("--clients", "4", "--rounds", "3", "--cohort", "3", "--local-epochs", "1"),
    *("--model", "mlp", "-o", "model.hidden=4", "--workers", "1", "--quiet"),
]


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(80) % 4
    x = (np.eye(4)[y] + 0.3 * rng.normal(size=(80, 4))).astype(np.float32)
    np.savez(tmp_path / "blobs.npz", x=x, y=y)
    np.savez(tmp_path / "line.npz", x=x, y=x[:, 0])
    return tmp_path


@pytest.fixture
def bfl(capsys):
    """Run a command; return exit status and everything printed."""

    def invoke(*words):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        return end.value.code, "".join(capsys.readouterr())

    return invoke


@pytest.fixture
def run(bfl, data):
    """Run a method on the tiny data; return the run directory."""

    def of(*words, method="superfed-mm", name="run"):
        given = ("--data", data / "blobs.npz", *TINY, *words, "--out", data / name)
        assert bfl("run", method, *given) == (0, "")
        return data / name

    return of


@pytest.mark.parametrize(
    "words",
    [
        ("--aggregator", "median"),
        ("--weighting", "equal"),
        ("--share", "body"),
        ("--novel-clients", "1"),
        ("--label-noise", "pair:0.4"),
    ],
)
def test_it_mixes_with_other_parts(run, words):
    path = run(*words)
    assert json.loads((path / "summary.json").read_text())["dropped"] == []


def test_a_run_measures_every_lambda_and_reports_the_curve(run):
    path = run(method="superfed-lm")
    curve = json.loads((path / "evaluation.json").read_text())["curves"]["lambda"]
    assert curve["values"] == [step / 10 for step in range(11)]
    assert len(curve["clients"]) == 4
    for name in ("accuracy", "nll", "ece"):
        each = [client[name] for client in curve["clients"]]
        np.testing.assert_allclose(np.mean(each, 0), curve["mean"][name])
    assert "Metrics along lambda" in (path / "report.html").read_text()


def test_bytes_are_fedavgs(run):
    ours, theirs = (
        json.loads((run(method=name, name=name) / "summary.json").read_text())["bytes"]
        for name in ("superfed-mm", "fedavg")
    )
    assert ours == theirs


def test_the_landscape_is_drawn_from_a_finished_run(run, bfl):
    path = run()
    status, printed = bfl("report", path, "--landscape")
    assert status == 0, printed
    page = (path / "report.html").read_text()
    assert "Loss landscape" in page
    assert "federated" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--label-noise", "pair:1.0"), "eps: 1.0 is not allowed"),
        (("--label-noise", "pear:0.1"), "did you mean pair?"),
        (("--label-noise", "symmetric:-0.1"), "at least 0 and below 1"),
        (("-o", "inference.start=2"), "inference.start: 2.0 is not allowed"),
        (("-o", "inference.fixed_lambda=1.5"), "inference.fixed_lambda: 1.5 is not allowed"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(bfl, data, words, message):
    out = data / "out"
    words = ("run", "superfed-mm", "--data", data / "blobs.npz", *TINY, *words, "--out", out)
    status, printed = bfl(*words)
    assert status == 2
    assert message in printed
    assert not out.exists()


def test_label_noise_is_refused_for_a_regression(bfl, data):
    words = ("run", "superfed-mm", "--data", data / "line.npz", *TINY, "--label-noise", "pair:0.1")
    status, printed = bfl(*words, "--out", data / "out")
    assert status == 2
    assert "needs class labels" in printed
    assert not (data / "out").exists()
