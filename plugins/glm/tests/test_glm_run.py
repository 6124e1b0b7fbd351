"""Tables of counts and of yes and no, from the file to coefficients and predictions."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
from scipy import special, stats

import bflcore

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


def pooled(n=150):
    draw = np.random.default_rng(1)
    age, sex = draw.normal(60, 12, n), draw.choice(["f", "m"], n)
    sites = draw.choice(["a", "b", "c", "d"], n, p=[0.5, 0.3, 0.15, 0.05])
    predictor = -2 + 0.03 * age + 0.5 * (sex == "m")
    columns = {
        "age": age,
        "sex": sex,
        "site": sites,
        "cost": 100 + 20 * predictor + draw.normal(0, 7, n),
        "ill": np.where(draw.random(n) < 1 / (1 + np.exp(-predictor)), "yes", "no"),
        "visits": draw.poisson(np.exp(predictor)),
    }
    return columns, np.column_stack([np.ones(n), age, sex == "m"])


def newton(design, slopes, weights):
    """Return the maximum-likelihood coefficients, and the inverse of the Hessian there."""
    w = np.zeros(design.shape[1])
    for _ in range(50):
        hessian = design.T @ (weights(design @ w)[:, None] * design)
        w = w + np.linalg.solve(hessian, design.T @ slopes(design @ w))
    return w, np.linalg.inv(design.T @ (weights(design @ w)[:, None] * design))


def expected(columns, design, target):
    """Return what a statistics package gives for the pooled table: coefficients and errors."""
    if target == "cost":
        y = columns["cost"]
        w, residual = np.linalg.lstsq(design, y, rcond=None)[:2]
        covariance = np.linalg.inv(design.T @ design) * residual[0] / (len(y) - 3)
    elif target == "ill":
        y = columns["ill"] == "yes"
        p = special.expit
        w, covariance = newton(design, lambda z: y - p(z), lambda z: p(z) * (1 - p(z)))
    else:
        y = columns["visits"]
        w, covariance = newton(design, lambda z: y - np.exp(z), np.exp)
    return w, np.sqrt(np.diag(covariance))


@pytest.mark.parametrize(
    ("target", "likelihood"), [("cost", "gaussian"), ("ill", "bernoulli"), ("visits", "poisson")]
)
def test_coefficients_and_intervals_are_those_of_the_pooled_table(tmp_path, target, likelihood):
    columns, design = pooled()
    others = {"cost", "ill", "visits"} - {target}
    run = bflcore.run(
        "glm",
        data={name: values for name, values in columns.items() if name not in others},
        target=target,
        client="site",
        likelihood=likelihood,
        test_fraction=0.0,
        out=tmp_path / "run",
        options={"inference.prior_sigma": 1e5},
    )
    w, errors = expected(columns, design, target)
    found = run.coefficients(0.95)
    assert [one.feature for one in found] == ["(intercept)", "age", "sex=m"]
    # A table is kept in single precision.
    np.testing.assert_allclose([one.mean for one in found], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([one.sd for one in found], errors, rtol=1e-5)
    reach = stats.norm.ppf(0.975) * errors
    np.testing.assert_allclose([one.upper for one in found], w + reach, rtol=1e-5, atol=1e-6)
