"""Tables of counts and of yes and no, from the file to coefficients and predictions."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

QUICK = ("--client", "site", "--model", "linear", "--rounds", "2", "--quiet")


@pytest.fixture
def patients(tmp_path):
    draw = np.random.default_rng(0)
    path = tmp_path / "patients.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "sex", "site", "visits", "ill"])
        for i in range(90):
            age = round(float(draw.normal(60, 12)), 1)
            visits = draw.poisson(2)
            rows.writerow([age, draw.choice(["f", "m"]), f"s{i % 3}", visits, i % 4 == 0])
    return path


@pytest.mark.parametrize(
    ("likelihood", "target", "other", "ratio"),
    [("bernoulli", "ill", "visits", "odds ratio"), ("poisson", "visits", "ill", "rate ratio")],
)
def test_coefficients_have_the_names_of_columns(bfl, patients, likelihood, target, other, ratio):
    data = ("--data", str(patients), "--target", target, "--drop", other)
    given = (*data, "--likelihood", likelihood, *QUICK, "--out", "run")
    assert bfl("run", "fedvi", *given) == (0, "", "")
    status, out, _ = bfl("coefficients", "run", "--level", "0.9")
    assert status == 0
    head, *lines = out.splitlines()
    assert head.split() == ["coefficient", "mean", "sd", "lower", "upper", *ratio.split()]
    assert [line.split()[0] for line in lines] == ["(intercept)", "age", "sex=m"]
    mean, shown = (float(lines[1].split()[i]) for i in (1, -1))
    assert shown == pytest.approx(math.exp(mean), abs=1e-3)
    assert bfl("coefficients", "run", "--out", "table.csv")[0] == 0
    page = (patients.parent / "run" / "report.html").read_text()
    assert "<h2>Coefficients: run</h2>" in page
    predicted = bfl("predict", "run", str(patients), "--client", "server", "--out", "p.csv")
    assert predicted[0] == 0


@pytest.mark.parametrize(
    ("likelihood", "target", "message"),
    [
        ("poisson", "age", "poisson is for counts, but a target is"),
        ("bernoulli", "site", "bernoulli is for 2 classes, but the targets have 3"),
    ],
)
def test_targets_that_the_likelihood_cannot_explain_cost_one_line(
    bfl, patients, likelihood, target, message
):
    given = ("--data", str(patients), "--target", target, "--likelihood", likelihood)
    status, out, err = bfl("run", "fedvi", *given, "--model", "linear", "--out", "run")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (patients.parent / "run").exists()


def test_a_run_of_another_model_has_no_coefficients(bfl, patients):
    given = ("--data", str(patients), "--target", "ill", "--client", "site", "--rounds", "1")
    assert bfl("run", "fedavg", *given, "--out", "run", "--quiet")[0] == 0
    status, _, err = bfl("coefficients", "run")
    assert status == 2
    assert "train one with --model linear" in err
