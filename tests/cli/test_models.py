"""`bfl predict` and `bfl export`: a model is used where its data are not."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import bflcore
from bflcore.api.prediction import NO_SETS

FLAGS = (
    *("--partition", "natural", "--clients", "3", "--workers", "1", "--rounds", "2"),
    *("--model", "mlp", "-o", "model.hidden=5", "--quiet"),
)


@pytest.fixture
def hospitals(bfl, tmp_path):
    """Train on three owners' samples, remove the file; return some new samples."""

    def train(*flags, method="fedbabu", real=False):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(60, 4)).astype(np.float32)
        y = x[:, 0] * 3 + 10 if real else np.arange(60) % 3
        path = tmp_path / "hospitals.npz"
        np.savez(path, x=x, y=y, client=np.repeat([7, 107, 900], 20))
        assert bfl("run", method, "--data", path, *FLAGS, *flags, "--out", "run")[0] == 0
        path.unlink()
        return rng.normal(size=(6, 4)).astype(np.float32)

    return train


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("form", ["npz", "csv"])
def test_predictions_of_a_table_are_those_of_python(bfl, hospitals, tmp_path, form):
    x, path = hospitals(), tmp_path / f"new.{form}"
    if form == "npz":
        np.savez(path, x=x)
    else:
        np.savetxt(path, x, delimiter=",", header="a,b,c,d", comments="", fmt="%.9g")
    found = bfl("predict", "run", path, "--client", "107", "--out", "p.csv")
    assert found == (0, "predictions: p.csv\n", "")
    expected = bflcore.load(tmp_path / "run").client(107).predict(x)
    table = rows(tmp_path / "p.csv")
    assert list(table[0]) == [
        *("label", "probability_0", "probability_1", "probability_2"),
        *("entropy", "epistemic", "aleatoric"),
    ]
    assert [row["label"] for row in table] == expected.names
    for name in ("entropy", "epistemic", "aleatoric"):
        assert [float(row[name]) for row in table] == getattr(expected, name).tolist()
    for label in range(3):
        probabilities = [float(row[f"probability_{label}"]) for row in table]
        assert probabilities == expected.probabilities[:, label].tolist()


def test_an_exported_model_predicts_without_its_run(bfl, hospitals, tmp_path):
    x = hospitals()
    np.savez(tmp_path / "new.npz", x=x)
    bfl("predict", "run", "new.npz", "--client", "7", "--out", "a.csv")
    found = bfl("export", "run", "--client", "7", "--to", "model.safetensors")
    assert found == (0, "model: model.safetensors\n", "")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert bfl("predict", "model.safetensors", "new.npz", "--out", "b.csv")[0] == 0
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


def test_a_regression_gives_means_and_intervals(bfl, hospitals, tmp_path):
    x = hospitals(real=True, method="fedvi")
    np.savez(tmp_path / "new.npz", x=x)
    assert bfl("predict", "run", "new.npz", "--client", "server", "--out", "p.csv")[0] == 0
    table = rows(tmp_path / "p.csv")
    assert list(table[0]) == ["mean", "std", "lower", "upper"]
    expected = bflcore.load(tmp_path / "run").server.predict(x)
    assert [float(row["upper"]) for row in table] == expected.interval(0.9)[1][:, 0].tolist()
    assert all(float(row["lower"]) < float(row["mean"]) < float(row["upper"]) for row in table)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "run", "new.npz", "--out", "p.csv"), "--client is missing; allowed: 7, 107"),
        (
            ("predict", "run", "new.npz", "--client", "9", "--out", "p.csv"),
            "unknown client '9'",
        ),
        (
            ("predict", "run", "new.npz", "--client", "server", "--out", "p.csv"),
            "the server's model is not complete",
        ),
        (("predict", "run", "narrow.csv", "--client", "7", "--out", "p.csv"), "3 columns"),
        (("predict", "run", "absent.csv", "--client", "7", "--out", "p.csv"), "cannot be read"),
        (("predict", "nowhere", "new.npz", "--client", "7", "--out", "p.csv"), "not a run dir"),
        (
            ("predict", "run", "new.npz", "--client", "7", "--out", "no/p.csv"),
            "--out: no/p.csv cannot be written",
        ),
        (("predict", "run", "new.npz", "--client", "7"), "Missing option '--out'"),
        (("export", "run", "--client", "7", "--to", "no/m.safetensors"), "cannot be written"),
        (("export", "run", "--to", "m.safetensors"), "--client is missing"),
        (("predict", "new.npz", "new.npz", "--out", "p.csv"), "cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(bfl, hospitals, tmp_path, words, message):
    x = hospitals("--share", "body", method="fedavg")
    np.savez(tmp_path / "new.npz", x=x)
    (tmp_path / "narrow.csv").write_text("1,2,3\n")
    before = sorted(tmp_path.rglob("*"))
    status, out, error = bfl(*words)
    assert (status, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_owner_of_an_exported_model_is_checked(bfl, hospitals, tmp_path):
    np.savez(tmp_path / "new.npz", x=hospitals())
    bfl("export", "run", "--client", "7", "--to", "m.safetensors")
    words = ("predict", "m.safetensors", "new.npz", "--out", "p.csv", "--client")
    assert bfl(*words, "7")[0] == 0
    status, _, error = bfl(*words, "107")
    assert (status, error.startswith("error: --client: m.safetensors is the model of 7")) == (2, 1)


@pytest.mark.parametrize("real", [False, True])
def test_predictions_of_a_calibrated_run_have_sets_or_intervals_and_flags(
    bfl, hospitals, tmp_path, real
):
    x = hospitals("--calibration-fraction", "0.5", method="fedvi", real=real)
    np.savez(tmp_path / "new.npz", x=x)
    words = ("predict", "run", "new.npz", "--client", "107", "--out", "p.csv", "--coverage", "0.8")
    assert bfl(*words)[::2] == (0, "")
    table = rows(tmp_path / "p.csv")
    prediction = bflcore.load(tmp_path / "run").client(107).predict(x)
    if real:
        lower = [float(row["lower"]) for row in table]
        assert lower == prediction.interval(0.8)[0][:, 0].tolist()
    else:
        assert [row["set"].split("|") for row in table] == prediction.set(0.8)
    flags = prediction.out_of_distribution.int().tolist()
    assert [int(row["out_of_distribution"]) for row in table] == flags
    words = (*words[:-1], "0.999")
    status, _, err = bfl(*words)
    assert status == 0
    assert err.startswith("warning: coverage 0.999 needs 999 client calibration samples (the scope")
    assert err.count("\n") == 1


def test_a_coverage_of_a_run_that_was_not_calibrated_is_one_line(bfl, hospitals, tmp_path):
    np.savez(tmp_path / "new.npz", x=hospitals())
    words = ("predict", "run", "new.npz", "--client", "7", "--out", "p.csv", "--coverage")
    assert bfl(*words, "0.9")[::2] == (2, f"error: {NO_SETS}\n")
    assert "coverage: 90.0 is not allowed; allowed: above 0 and below 1" in bfl(*words, "90")[2]
    assert not (tmp_path / "p.csv").exists()
