"""The baselines from the command line: mixed with other parts, and what is refused."""

import json

import numpy as np
import pytest

from bflcore.cli import main
from bflcore.data.partition import IID
from bflcore.registry.loading import load_registry

TINY = [
    *("--clients", "3", "--rounds", "2", "--local-epochs", "1", "--partition", "labels:3"),
    *("--model", "mlp", "-o", "model.hidden=4", "--workers", "1", "--quiet"),
]


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(80) % 4
    x = (np.eye(4)[y] + 0.3 * rng.normal(size=(80, 4))).astype(np.float32)
    np.savez(tmp_path / "blobs.npz", x=x, y=y)
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
def run(bfl, data, monkeypatch):
    """Run a method on the tiny data, without drawing a report; return the summary."""
    monkeypatch.setattr("bflcore.report.write_report", lambda runs: data)

    def of(method, *words, name="run"):
        out = data / name
        given = ("--data", data / "blobs.npz", *TINY, *words, "--out", out)
        assert bfl("run", method, *given) == (0, "")
        return json.loads((out / "summary.json").read_text())

    return of


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ditto", ("--aggregator", "median")),
        ("pfedbayes", ("--aggregator", "conflation")),
        ("apfl", ("--novel-clients", "1")),
        ("fedpop", ("--novel-clients", "1")),
        ("scaffold", ("--share", "body", "--cohort", "2")),
        ("group-snip", ("--share", "body")),
    ],
)
def test_methods_mix_with_other_parts(run, method, words):
    assert not run(method, *words)["dropped"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("fedper", "--share", "head"), ("lg-fedavg",)),
        (("fedper", "--share", "all"), ("fedavg",)),
    ],
)
def test_two_names_for_the_same_thing_give_the_same_figures(run, one, other):
    assert run(*one, name="one")["final"] == run(*other, name="other")["final"]


def test_fedsoul_is_fedpop():
    registry = load_registry()
    assert registry.methods["fedsoul"] is registry.methods["fedpop"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("fedrep", "--share", "all"), "inference.stages"),
        (("centralised", "--share", "body"), "--share: inference pooled"),
        (
            ("scaffold", "-o", "inference.optimiser=adam"),
            "inference.optimiser: 'adam' is not allowed; allowed: 'sgd'",
        ),
        (
            ("scaffold", "-o", "inference.momentum=0.9"),
            "inference.momentum: 0.9 is not allowed; allowed: 0.0",
        ),
        (("fedavg-ft", "--partition", "iid", "--clients", "90"), "--clients: 90"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(bfl, data, words, expected):
    code, printed = bfl("run", "--data", data / "blobs.npz", *words, "--out", data / "no")
    assert code == 2
    assert expected in printed
    assert not (data / "no").exists()


def test_a_client_without_samples_is_refused_by_name(bfl, data, monkeypatch):
    def all_but_one(partition, dataset, clients, rng):
        return [*np.array_split(np.arange(len(dataset.x)), clients - 1), np.arange(0)]

    monkeypatch.setattr(IID, "assign", all_but_one)
    words = ("run", "ditto", "--data", data / "blobs.npz", "--partition", "iid", "--clients", "3")
    code, printed = bfl(*words, "--out", data / "no")
    assert code == 2
    assert "leaves client 2 without samples" in printed
    assert not (data / "no").exists()
