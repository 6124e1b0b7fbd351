"""An experiment in Flower's simulation: the numbers are the local engine's.

In processes of their own: Flower allows one simulation a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bflcore.registry.loading import load_registry

BFL = str(Path(sys.executable).with_name("bfl"))
DATA = ("--data", "synthetic", "--partition", "natural", "--clients", "4", "-o", "dataset.owners=4")
RAW = ("-o", "dataset.samples=30", "-o", "dataset.standardise=true")  # by the clients' answers
RUN = (*DATA, *RAW, "--rounds", "3", "--cohort", "2", "--eval-every", "1")
METHODS = sorted(name for name in load_registry().methods if name != "centralised")


def command(folder, *arguments):
    done = subprocess.run(
        [BFL, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


def records(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize(
    "method",
    [
        "bpfed",  # personal memories, a client held out of training
        *(pytest.param(name, marks=pytest.mark.thorough) for name in METHODS if name != "bpfed"),
    ],
)
def test_the_metrics_are_the_local_engines(method, tmp_path):
    novel = ("--novel-clients", "1") if method == "bpfed" else ()
    arguments = ("run", method, *RUN, *novel, "--quiet")
    for workers in "12":
        status, _, err = command(
            tmp_path, *arguments, "--workers", workers, "--out", f"local-{workers}"
        )
        assert status == 0, err
    status, _, err = command(tmp_path, *arguments, "--engine", "flower", "--out", "flower")
    assert (status, err) == (0, "")
    expected = records(tmp_path / "local-1")
    assert records(tmp_path / "flower") == expected
    assert records(tmp_path / "local-2") == expected
    mine, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / run / "models").iterdir()}
        for run in ("flower", "local-1")
    )
    assert mine == theirs  # the clients' models, too


def test_the_engine_conforms(tmp_path):
    status, out, err = command(tmp_path, "check-plugin", "flower", "--json")
    assert status == 0, out + err
    checked = {row["check"] for row in json.loads(out) if row["kind"] == "engine"}
    assert "two rounds equal the local engines" in checked


@pytest.mark.thorough
def test_a_run_that_stopped_goes_on_to_the_bit(tmp_path):
    """Stopped for lack of clients: memories come back from the checkpoint, not from Ray."""
    arguments = ("run", "bpfed", *RUN, "--engine", "flower", "--quiet")
    assert command(tmp_path, *arguments, "--out", "whole")[0] == 0
    process = subprocess.Popen([BFL, *arguments, "--out", "part"], cwd=tmp_path)
    store = tmp_path / "part" / "checkpoint"
    while not list(store.glob("000001.safetensors")) and process.poll() is None:
        pass
    process.kill()
    process.wait()
    assert command(tmp_path, "resume", "part", "--quiet")[0] == 0
    assert records(tmp_path / "part") == records(tmp_path / "whole")
