"""`bflcore.run`, from a file to the pooled posterior: faults, kills, workers, engines, bad input.

The run directory of a killed process is resumed, and the result is the closed form all the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import bflcore

from .pooled import SIZES, condition, design, gaussian_posterior

NOISE, SIGMA = 0.5, 3.0
OPTIONS = {
    "inference.prior_sigma": SIGMA,
    "likelihood.noise_variance": NOISE,
    "dataset.standardise": "false",
}
ROUNDS = 15


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """An .npz file of ten owners' samples, and what their training samples say, pooled."""
    x, client = design()
    noise = np.random.default_rng(4).standard_normal(len(x))
    y = x @ np.linspace(-1, 1, x.shape[1]) + 0.3 + np.sqrt(NOISE) * noise
    x, y = (each.astype(np.float32).astype(float) for each in (x, y))
    path = tmp_path_factory.mktemp("table") / "pooled.npz"
    rows = np.r_[0, np.cumsum(SIZES)[:-1]]  # each owner's first sample
    own = {"x_test": x[rows], "y_test": y[rows], "client_test": client[rows]}
    np.savez(path, x=x, y=y, client=client, **own)
    assert condition(x) > 100
    return path, gaussian_posterior(x, y, NOISE, SIGMA)


def flags(path, **more):
    return {
        "data": str(path),
        "inference": "linear-gaussian",
        "likelihood": "gaussian",
        "rounds": ROUNDS,
        "eval_every": ROUNDS,
        "drop_out": 0.3,
        "seed": 2,
        **more,
    }


def apart(found, expected):
    """Return the largest errors of the server's mean, over its largest entry, and covariance."""
    mean, covariance = expected
    q = found.server.broadcast.start.map(torch.Tensor.double)
    return abs(q.mean.numpy() - mean).max() / abs(mean).max(), abs(
        q.covariance.numpy() - covariance
    ).max()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_a_run_with_drop_outs_ends_at_the_closed_form(table, tmp_path, workers, dtype, tolerance):
    path, expected = table
    given = flags(path, workers=workers, dtype=dtype)
    found = bflcore.run("glm", out=tmp_path / "run", options=OPTIONS, **given)
    assert max(apart(found, expected)) < tolerance


def command(path, out):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags(path).items()]
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    words = [word.replace(f"={ROUNDS}", "=60") if "rounds" in word else word for word in words]
    return [sys.executable, "-m", "bflcore.cli", "run", "glm", *words, *options, f"--out={out}"]


@pytest.mark.skipif(os.name == "nt", reason="there is no such signal")
def test_a_killed_run_is_resumed_to_the_closed_form(table, tmp_path):
    path, expected = table
    out = tmp_path / "killed"
    with subprocess.Popen(command(path, out), stdout=subprocess.DEVNULL) as process:
        for _ in range(6_000):
            if any((out / "checkpoint").glob("00000[2-9].safetensors")):
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    found = bflcore.resume(out)
    assert max(apart(found, expected)) < 1e-12


@pytest.mark.thorough
def test_the_flower_simulation_ends_at_the_closed_form(table, tmp_path):
    path, expected = table
    out = tmp_path / "flower"  # in a process of its own, as Flower's simulation has to be
    words = [*command(path, out), "--engine=flower", f"--rounds={ROUNDS}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(apart(bflcore.load(out), expected)) < 1e-12


def test_a_collinear_column_is_one_line(table, tmp_path):
    x, client = design()
    x[:, 4] = x[:, 0] + x[:, 2] - 1
    path = tmp_path / "collinear.npz"
    np.savez(path, x=x, y=x[:, 0], client=client)
    words = command(path, tmp_path / "none")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "column 4 (from 0) is a linear combination of the intercept" in done.stderr
    assert not (tmp_path / "none").exists()


def test_too_many_parameters_are_one_line(tmp_path):
    path = tmp_path / "wide.npz"
    np.savez(path, x=np.zeros((20, 5_000)), y=np.zeros(20), client=np.repeat([0, 1], 10))
    done = subprocess.run(
        command(path, tmp_path / "none"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "5,001 parameters are too many" in done.stderr
    assert not (tmp_path / "none").exists()


def test_the_other_rules_are_refused_by_what_they_lack(table, tmp_path):
    with pytest.raises(bflcore.BflError, match="multiplies-changes"):
        bflcore.run("glm", out=tmp_path / "run", **flags(table[0], aggregator="average"))
    assert sum(SIZES) == len(np.load(table[0])["x"])
