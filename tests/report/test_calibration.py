"""The report's section on calibrated predictions."""

from pathlib import Path

import attrs
import pytest
import scipy.stats

from bflcore.report.calibration import covered, section
from bflcore.report.plots import COLOURS
from bflcore.report.reading import Run


def run(label, calibrated=None, personal=None):
    evaluation = {"personal": {"pooled": personal or {"nll": 0.5, "ece": 0.1}}}
    if calibrated:
        evaluation["calibrated"] = {"pooled": calibrated[0], "clients": calibrated[1:]}
    records = [{"personal.rmse": {}}] if personal else [{}]
    return Run(Path(label), {}, records, {}, evaluation, {})


def test_runs_without_calibration_have_no_section():
    assert section([run("a"), run("b")])["rows"] == []


def test_a_row_has_the_metrics_before_and_after_and_the_worst_client():
    after = {"nll": 0.4, "ece": 0.05, "set_coverage90": 0.91, "set_size90": 1.25}
    after |= {"out_of_distribution": 0.04}
    clients = [{"set_coverage90": 0.95}, {"set_coverage90": 0.82}]
    found = section([run("a", (after, *clients)), run("b")])
    assert found["columns"] == [
        *("run", "NLL before", "NLL after", "ECE before", "ECE after"),
        *("90 % sets: coverage", "90 %: lowest", "90 %: size", "flagged as strange"),
    ]
    assert found["rows"] == [
        ["a", "0.500", "0.400", "0.100", "0.050", "0.910", "0.820", "1.250", "0.040"]
    ]


def test_a_regression_has_intervals_whose_width_may_be_infinite():
    after = {"nll": 1.0, "interval_coverage90": 1.0}
    found = section([run("a", (after, {"interval_coverage90": 1.0}), {"nll": 2.0, "rmse": 1.0})])
    assert dict(zip(found["columns"], found["rows"][0], strict=True)) == {
        "run": "a",
        "NLL before": "2.000",
        "NLL after": "1.000",
        "90 % intervals: coverage": "1.000",
        "90 %: lowest": "1.000",
        "90 %: width": "-",
    }


@pytest.mark.parametrize("fraction", [None, "0.5"])
def test_the_page_has_the_section_if_the_run_was_calibrated(bfl, tmp_path, fraction):
    words = ("--data", "synthetic", "-o", "dataset.owners=2", "-o", "dataset.samples=60")
    words += ("--clients", "2", "--rounds", "1", "--workers", "1", "--quiet", "--out", "run")
    flags = ("--calibration-fraction", fraction) if fraction else ()
    assert bfl("run", "fedavg", *words, *flags)[0] == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert ("Calibrated predictions" in page) is bool(fraction)
    assert ("90 % sets: coverage" in page) is bool(fraction)


def client(number, share, examples=100):
    return {"client": number, "examples": examples, "set_coverage90": share}


@pytest.mark.parametrize(("scope", "below"), [("federated", 2), ("client", 1)])
def test_clients_outside_of_their_band_are_counted(scope, below):
    """With 100 tests the binomial band is 0.84 to 0.95; with 20 own samples 0.73 to 0.99."""
    shares = (0.70, 0.80, 0.90, 0.93)
    one = run("a", ({}, *(client(i, share) for i, share in enumerate(shares))))
    sizes = {"clients": [{"id": i, "calibration": 20} for i in range(4)]}
    given = {"calibrator": {"conformal": {"scope": scope, "group": "none", "confidence": 0.0}}}
    (found,) = covered([attrs.evolve(one, description=sizes, experiment=given)])
    assert f"{below} of 4 are below their band and 0 above" in found["sentence"]
    kind = "binomial" if scope == "federated" else "beta-binomial"
    assert f"({kind})" in found["sentence"]
    assert COLOURS[1].lower() in found["svg"]


def test_as_many_clients_are_due_outside_as_whole_numbers_allow():
    """Of 20 samples at 90 %, fewer than 15 are covered with p = 0.011, and more than 20 never."""
    one = run("a", ({}, *(client(i, 0.9, examples=20) for i in range(50))))
    (found,) = covered([one])
    due = 50 * scipy.stats.binom.cdf(14, 20, 0.9)
    assert f"{due:.1f} and 0.0 are to be expected" in found["sentence"]


def test_a_client_without_calibration_samples_of_its_own_has_sets_of_everything():
    given = {"calibrator": {"conformal": {"scope": "client", "group": "none", "confidence": 0.0}}}
    one = run("a", ({}, client(0, 1.0), client(1, 0.99)))
    sizes = {"clients": [{"id": i, "calibration": 0} for i in range(2)]}
    (found,) = covered([attrs.evolve(one, description=sizes, experiment=given)])
    assert "1 of 2 are below their band and 0 above; 0.0 and 0.0" in found["sentence"]


def test_a_run_without_sets_has_no_picture_of_coverage():
    assert covered([run("a"), run("b", ({"nll": 1.0}, {"client": 0, "nll": 1.0}))]) == []
