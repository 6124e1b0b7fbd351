"""Programs for other runtimes predict as the model does, from raw samples."""

from __future__ import annotations

import json
import sys

import attrs
import numpy as np
import pytest
import torch

import bflcore
from bflcore.api.exporting import program_of

from .test_runs import METHODS, OWNERS, options_for, trained

CLOSED_FORM = ("em-tdamp", "em-tdamp-paper", "fedsi", "fedsi-fac")
EACH_KIND = ("bpfed", "ditto", "fedavg", "fedpop", "mc-dropout", "superfed-mm")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # caveats of tiny runs


def by_torch(path, x):
    """Run a .pt2 file, without bflcore."""
    return torch.export.load(path).module()(torch.as_tensor(x))


def by_onnx(path, x):
    """Run an .onnx file."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    return runtime.InferenceSession(path, options).run(None, {"x": x})


@pytest.mark.parametrize(
    "method",
    [
        m if m in EACH_KIND else pytest.param(m, marks=pytest.mark.thorough)
        for m in METHODS
        if m not in CLOSED_FORM
    ],
)
def test_a_program_of_torch_predicts_as_the_model_does(tmp_path, method):
    run, tests = trained(tmp_path, method)
    for number in (0, 2):
        model, (x, _) = run.client(OWNERS[number]), tests[number]
        path = tmp_path / f"{number}.pt2"
        said = model.export(path)
        expected = model.predict(x)
        assert said.startswith("x float32 [batch, 6] -> probabilities; ")
        count = len(expected.draws)
        assert said.endswith("1 network" if count == 1 else f"{count} draws averaged")
        for some in (x, x[:1]):  # a batch of any size
            found = by_torch(path, some)
            assert torch.allclose(found.double(), model.predict(some).probabilities, atol=1e-6)


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_program_has_the_clients_label_prior(tmp_path, suffix):
    if suffix == ".onnx":
        pytest.importorskip("onnx")
    options = options_for("bpfed") | {"likelihood.label_prior": 2.0}
    run, tests = trained(tmp_path, "bpfed", options=options, likelihood="categorical")
    path, (x, _) = tmp_path / f"model{suffix}", tests[1]
    for model in (run.client(107), run.client(107).assuming("uniform")):
        model.export(path)
        found = by_torch(path, x) if suffix == ".pt2" else by_onnx(path, x)[0]
        assert np.allclose(found, model.predict(x).probabilities, atol=1e-5)


@pytest.mark.parametrize("method", ["bpfed", "mc-dropout"])
def test_a_program_of_onnx_predicts_as_the_model_does(tmp_path, method, capfd):
    onnx = pytest.importorskip("onnx")
    run, tests = trained(tmp_path, method)
    model, (x, _) = run.client(107), tests[1]
    path = tmp_path / "model.onnx"
    model.export(path)
    assert capfd.readouterr() == ("", "")
    for some in (x, x[:1]):
        (found,) = by_onnx(path, some)
        assert np.allclose(found, model.predict(some).probabilities, atol=1e-5)
    card = json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["bflcore"])
    assert (card["id"], card["method"], card["draws"]) == (107, method, 3)
    assert card["classes"] == ["0", "1", "2"]
    assert [value.name for value in onnx.load(path).graph.output] == ["probabilities"]


def test_the_number_of_draws_can_be_chosen(tmp_path):
    run, tests = trained(tmp_path, "fedvi")
    model, (x, _) = run.client(7), tests[0]
    assert model.export(tmp_path / "m.pt2", draws=11).endswith("11 draws averaged")
    more = attrs.evolve(model, inference=model.inference.replace(predict_draws=11))
    found = by_torch(tmp_path / "m.pt2", x)
    assert torch.allclose(found.double(), more.predict(x).probabilities, atol=1e-6)
    assert not torch.allclose(found.double(), model.predict(x).probabilities, atol=1e-4)


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_regression_gives_mean_and_variance_in_units_of_its_targets(tmp_path, suffix):
    from bflcore.data.sources import Boston

    flags = {"clients": 3, "rounds": 2, "workers": 1, "model": "mlp", "out": tmp_path / "run"}
    options = {"model.hidden": (5,), "inference.predict_draws": 4}
    model = bflcore.run("fedvi", data="boston", options=options, **flags).client(1)
    x = Boston().load().x[:40]
    path = tmp_path / f"m.{suffix}"
    assert "x float32 [batch, 13] -> mean, variance; 4 draws" in model.export(path)
    mean, variance = (by_torch if suffix == "pt2" else by_onnx)(path, x)
    expected = model.predict(x)
    assert np.allclose(mean, expected.mean, rtol=1e-5)
    assert np.allclose(variance, expected.std**2, rtol=1e-4)


@pytest.mark.parametrize("form", ["0,1", "-1,1"])
def test_bytes_are_given_as_bytes(tmp_path, form):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    data = {"x": x, "y": np.arange(60) % 3, "client": np.repeat(OWNERS, 20)}
    run, _ = trained(tmp_path, data=data, options={}, model="two-cnn", input_range=form)
    model = run.client(7)
    assert model.export(tmp_path / "m.pt2").startswith("x uint8 [batch, 1, 8, 8]")
    found = by_torch(tmp_path / "m.pt2", x)
    assert torch.allclose(found.double(), model.predict(x).probabilities, atol=1e-6)


@pytest.mark.parametrize("method", CLOSED_FORM[::2])
def test_a_prediction_without_draws_of_weights_is_refused_in_one_line(tmp_path, method):
    run, _ = trained(tmp_path, method)
    with pytest.raises(
        bflcore.OptionError, match="does not predict with draws of network"
    ) as error:
        run.client(7).export(tmp_path / "m.pt2")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m.pt2").exists()


def test_a_closed_form_beside_draws_is_not_mistaken_for_their_average(tmp_path):
    run, _ = trained(tmp_path, "fedvi")
    model = run.client(7)

    class Closed(type(model.inference)):
        name = "closed"

        def predict(self, problem, broadcast, cohort, x):
            found = super().predict(problem, broadcast, cohort, x)
            return attrs.evolve(found, closed_form=found.draws.mean(1))

    values = attrs.asdict(model.inference, recurse=False)
    strange = attrs.evolve(model, inference=Closed(**values))
    with pytest.raises(bflcore.OptionError, match="does not predict with draws"):
        program_of(strange)


@pytest.mark.parametrize(
    ("method", "draws", "message"),
    [
        ("fedavg", 5, "--draws: inference map always predicts with the same networks"),
        ("fedvi", 0, "--draws: 0 is not allowed; allowed: at least 1"),
    ],
)
def test_a_number_of_draws_that_cannot_be_is_refused(tmp_path, method, draws, message):
    run, _ = trained(tmp_path, method)
    with pytest.raises(bflcore.OptionError, match=message):
        run.client(7).export(tmp_path / "m.pt2", draws=draws)


def test_what_is_missing_or_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    run, _ = trained(tmp_path)
    with pytest.raises(bflcore.RunError, match="m.pt2 cannot be written"):
        run.client(7).export(tmp_path / "no" / "m.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(bflcore.RunError, match=r"pip install 'bflcore\[onnx\]'"):
        run.client(7).export(tmp_path / "m.onnx")


def test_a_program_of_a_calibrated_model_says_that_it_is_not_calibrated(tmp_path):
    flags = {"calibration_fraction": 0.3, "calibrate": ("temperature",)}
    run, tests = trained(tmp_path, "fedvi", **flags)
    model, (x, _) = run.client(7), tests[0]
    said = model.export(tmp_path / "m.pt2")
    assert said.endswith("; without the run's calibration (temperature)")
    found = by_torch(tmp_path / "m.pt2", x).double()
    assert torch.allclose(found, model.predict(x, calibrated=False).probabilities, atol=1e-6)


def test_a_program_of_a_table_takes_encoded_columns_and_names_them(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["age,sex,sick"]
    for _ in range(60):
        age, sex = rng.normal(50, 10), rng.choice(["f", "m"])
        lines.append(f"{age:.3f},{sex},{'yes' if age > 50 else 'no'}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    flags = {"clients": 2, "rounds": 2, "workers": 1, "out": tmp_path / "run"}
    run = bflcore.run("fedavg", data=path, target="sick", **flags)
    said = run.client(0).export(tmp_path / "m.pt2")
    assert "x float32 [batch, 3] -> probabilities; 1 network" in said
    assert "; x has encoded columns: age, sex=f, sex=m" in said
    rows = [{"age": 41.5, "sex": "m"}, {"age": 70.0, "sex": "f"}]
    found = by_torch(tmp_path / "m.pt2", np.array([[41.5, 0, 1], [70, 1, 0]], np.float32))
    expected = run.client(0).predict(rows).probabilities
    assert torch.allclose(found.double(), expected, atol=1e-6)
