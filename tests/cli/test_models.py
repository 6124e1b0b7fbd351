"""`bfl predict`, `bfl export`, `bfl adapt`: a model is used where its data are not."""

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


@pytest.mark.parametrize("form", ["npz", "csv", "parquet"])
def test_predictions_of_a_table_are_those_of_python(bfl, hospitals, tmp_path, form):
    x, path = hospitals(), tmp_path / f"new.{form}"
    if form == "npz":
        np.savez(path, x=x)
    elif form == "parquet":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(x, columns=list("abcd")).to_parquet(path)
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


@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_a_table_of_predictions_is_the_same_in_every_format(bfl, hospitals, tmp_path, form):
    np.savez(tmp_path / "new.npz", x=hospitals(method="fedvi"))
    words = ("predict", "run", "new.npz", "--client", "107", "--out")
    bfl(*words, "p.csv")
    assert bfl(*words, f"p.{form}") == (0, f"predictions: p.{form}\n", "")
    table = rows(tmp_path / "p.csv")
    if form == "npz":
        with np.load(tmp_path / "p.npz", allow_pickle=False) as file:
            found = {name: file[name].tolist() for name in file.files}
    else:
        pandas = pytest.importorskip("pandas")
        frame = pandas.read_parquet(tmp_path / "p.parquet")
        found = {name: frame[name].tolist() for name in frame.columns}
    assert list(found) == list(table[0])
    assert found.pop("label") == [row["label"] for row in table]
    for name, column in found.items():
        assert column == [float(row[name]) for row in table]


def test_many_samples_are_predicted_in_pieces_as_at_once(bfl, hospitals, tmp_path, monkeypatch):
    hospitals(method="fedvi")
    monkeypatch.setattr("bflcore.cli.models.PIECE", 2048)
    x = np.random.default_rng(1).normal(size=(5000, 4)).astype(np.float32)
    np.savez(tmp_path / "new.npz", x=x)
    words = ("predict", "run", "new.npz", "--client", "107", "--out", "p.npz")
    assert bfl(*words)[0] == 0
    expected = bflcore.load(tmp_path / "run").client(107).predict(x)
    with np.load(tmp_path / "p.npz") as file:
        assert file["epistemic"].tolist() == expected.epistemic.tolist()
    np.savez(tmp_path / "new.npz", x=x[:0])
    assert bfl(*words)[0] == 0
    with np.load(tmp_path / "p.npz") as file:
        assert file["label"].shape == (0,)


def test_a_failed_write_leaves_the_old_table(bfl, hospitals, tmp_path, monkeypatch):
    np.savez(tmp_path / "new.npz", x=hospitals())
    (tmp_path / "p.csv").write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    words = ("predict", "run", "new.npz", "--client", "7", "--out", "p.csv")
    status, _, error = bfl(*words)
    assert status == 2
    assert error.startswith("error: --out: p.csv cannot be written (No space left on device, ")
    assert "MiB are free); free disk space" in error
    assert (tmp_path / "p.csv").read_text() == "old"
    assert not list(tmp_path.glob(".p*"))


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_program_is_written_and_says_what_it_maps(bfl, hospitals, tmp_path, suffix):
    x = hospitals(method="fedvi")
    words = ("export", "run", "--client", "7", "--to", f"m.{suffix}", "--draws", "4")
    status, out, error = bfl(*words)
    assert (status, error) == (0, "")
    assert out == (
        f"program: m.{suffix}\nx float32 [batch, 4] -> probabilities; 4 draws averaged\n"
    )
    if suffix == "pt2":
        import torch

        found = torch.export.load(tmp_path / "m.pt2").module()(torch.as_tensor(x))
    else:
        runtime = pytest.importorskip("onnxruntime")
        (found,) = runtime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    assert np.allclose(np.asarray(found).sum(1), 1, atol=1e-6)


def test_a_client_never_seen_gets_a_model_in_one_command(bfl, hospitals, tmp_path):
    hospitals(method="fedper")
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    found = bfl("adapt", "run", "mine.npz", "--out", "new.bfl")
    assert found == (0, "model: new.bfl (adapted to 20 samples)\n", "")
    assert bfl("predict", "new.bfl", "mine.npz", "--out", "p.npz")[0] == 0
    expected = bflcore.load(tmp_path / "run").adapt(x, y).predict(x)
    with np.load(tmp_path / "p.npz") as file:
        assert file["probability_1"].tolist() == expected.probabilities[:, 1].tolist()
    other = bflcore.load(tmp_path / "run").client(7).predict(x)
    assert not np.allclose(other.probabilities, expected.probabilities)


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
        (
            ("predict", "run", "new.npz", "--client", "7", "--out", "p.xlsx"),
            "p.xlsx has an unknown format; allowed: a name that ends in .csv, .parquet, .npz",
        ),
        (("export", "run", "--client", "7", "--to", "m.pt"), "--to: m.pt has an unknown format"),
        (
            ("export", "run", "--client", "7", "--to", "m.bfl", "--draws", "3"),
            "--draws: m.bfl holds the posterior, not draws",
        ),
        (("adapt", "run", "new.npz", "--out", "m.bfl"), "array 'y' is missing; the file has x"),
        (("adapt", "run", "narrow.csv", "--out", "m.bfl"), "give an .npz file with x and y"),
        (("adapt", "run", "new.npz", "--out", "m.onnx"), "--out: m.onnx has an unknown format"),
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


def test_other_label_frequencies_are_assumed_on_demand(bfl, hospitals, tmp_path):
    chosen = ("--likelihood", "categorical", "-o", "likelihood.label_prior=1")
    x = hospitals(*chosen, method="fedavg")
    np.savez(tmp_path / "new.npz", x=x)
    words = ("new.npz", "--client", "107", "--label-prior", "uniform", "--out", "p.csv")
    assert bfl("predict", "run", *words) == (0, "predictions: p.csv\n", "")
    model = bflcore.load(tmp_path / "run").client(107)
    found = [float(row["probability_2"]) for row in rows(tmp_path / "p.csv")]
    expected = model.assuming("uniform").predict(x).probabilities[:, 2]
    assert np.allclose(found, expected, rtol=1e-6)
    assert not np.allclose(found, model.predict(x).probabilities[:, 2])
    words = ("--client", "107", "--label-prior", "uniform", "--to", "m.bfl")
    assert bfl("export", "run", *words)[0] == 0
    again = bflcore.load_model(tmp_path / "m.bfl").predict(x).probabilities[:, 2]
    assert np.allclose(again, expected)


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
    assert err.startswith("note: coverage 0.999 needs 999 client calibration samples (the scope")
    assert err.count("\n") == 1


def test_a_coverage_of_a_run_that_was_not_calibrated_is_one_line(bfl, hospitals, tmp_path):
    np.savez(tmp_path / "new.npz", x=hospitals())
    words = ("predict", "run", "new.npz", "--client", "7", "--out", "p.csv", "--coverage")
    assert bfl(*words, "0.9")[::2] == (2, f"error: {NO_SETS}\n")
    assert "coverage: 90.0 is not allowed; allowed: above 0 and below 1" in bfl(*words, "90")[2]
    assert not (tmp_path / "p.csv").exists()


def test_a_client_never_seen_may_bring_a_table(bfl, tmp_path):
    rng = np.random.default_rng(0)
    ages, wards = rng.normal(60, 15, 90), rng.choice(["er", "icu"], 90)
    lines = [
        f"{age:.1f},{ward},{'abc'[k // 30]},{'mild' if age > 60 else 'severe'}"
        for k, (age, ward) in enumerate(zip(ages, wards, strict=True))
    ]
    (tmp_path / "all.csv").write_text("\n".join(["age,ward,hospital,outcome", *lines]) + "\n")
    of = ("--target", "outcome", "--client", "hospital", "--rounds", "2", "--quiet")
    assert bfl("run", "fedper", "--data", "all.csv", *of, "--out", "run")[0] == 0
    (tmp_path / "all.csv").unlink()
    mine = [line.replace(",a,", ",x,") for line in lines[:30]]
    (tmp_path / "mine.csv").write_text("\n".join(["age,ward,zip,outcome", *mine]) + "\n")
    status, out, error = bfl("adapt", "run", "mine.csv", "--out", "new.bfl")
    assert (status, out) == (0, "model: new.bfl (adapted to 30 samples)\n")
    assert error.count("note: ") == 1  # the column zip is ignored
    assert bfl("predict", "new.bfl", "mine.csv", "--out", "p.csv")[0] == 0
    assert {row["label"] for row in rows(tmp_path / "p.csv")} <= {"mild", "severe"}
    (tmp_path / "bare.csv").write_text("age,ward\n60,er\n")
    assert "has no column 'outcome'" in bfl("adapt", "run", "bare.csv", "--out", "b.bfl")[2]
