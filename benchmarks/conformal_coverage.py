"""Do conformal sets cover what they promise, and are federated ones smaller than local ones?

    python benchmarks/conformal_coverage.py [--runs FOLDER] [--seeds N ...] [--rounds N] [--pages]

Trains each method on each data set with 50 and with 20 calibration samples per client, and measures
the sets of all scopes on test samples: one run gives them all, because thresholds are computed from
stored histograms. Finished runs are kept in FOLDER, so that an interrupted study continues. Writes
docs/results/conformal.json and .md (--pages: from the runs that are there).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import attrs
import numpy as np
import torch
from scipy import stats

import bflcore
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import read, resolve
from bflcore.problem.calibration.conformal import Conformal
from bflcore.registry.loading import load_registry

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COVERAGE = 0.9
BAND = 0.99
METHODS = ("fedavg", "fedper")
# Data set -> its flags, and the fraction of training samples that leaves so many for calibration.
DATA: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "mnist5k": ({"data": "mnist5k"}, {50: 0.125, 20: 0.05}),
    "fashion-mnist": (
        {
            "data": "fashion-mnist",
            "partition": "labels:5",
            "train_per_class": 50,
            "test_per_class": 950,
        },
        {50: 0.2, 20: 0.08},
    ),
}
KINDS = {
    "client": {"scope": "client"},
    "shrunk": {"scope": "shrunk"},
    "federated": {"scope": "federated"},
    "client, confidence .95": {"scope": "client", "confidence": 0.95},
    "federated, confidence .95": {"scope": "federated", "confidence": 0.95},
}


@attrs.frozen
class Cell:
    """One run."""

    data: str
    method: str
    samples: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder and of its figures."""
        return f"{self.data}-{self.method}-{self.samples}-{self.seed}"


def main() -> None:
    """Run what is missing and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/conformal"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pages", action="store_true")
    given = parser.parse_args()
    cells = [
        Cell(data, method, samples, seed)
        for seed in given.seeds
        for data, (_, fractions) in DATA.items()
        for method in METHODS
        for samples in fractions
    ]
    given.runs.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in cells:
        file = given.runs / f"{cell.name}.json"
        if not file.exists():
            if given.pages:
                continue
            file.write_text(json.dumps(measure(cell, given.runs, given.rounds)))
            print(file.stem, flush=True)
        rows += json.loads(file.read_text())
    write(rows, given.seeds, given.rounds)


def measure(cell: Cell, runs: Path, rounds: int) -> list[dict[str, Any]]:
    """Train one run if it is missing, and return its figures: one row per client and kind of set."""
    flags, fractions = DATA[cell.data]
    folder = runs / cell.name
    if not (folder / "summary.json").exists():
        bflcore.run(
            cell.method,
            out=folder,
            rounds=rounds,
            seed=cell.seed,
            eval_every=rounds,
            workers=1,
            calibration_fraction=fractions[cell.samples],
            options={"calibrator.conformal.scope": "client"},
            **flags,
        )
    run = bflcore.load(folder)
    experiment = resolve(load_registry(), cell.method, read(folder / "experiment.toml"), {})
    problem = prepare(experiment).problem
    rows = []
    for client in problem.clients:
        x, y = problem.test.of(client)
        model = run.client(client)
        made = model.predict(x).made
        p = made.draws[0].double().mean(0)
        common = {**attrs.asdict(cell), "client": client, "tests": len(y)}
        common["accuracy"] = float((p.argmax(1) == y).double().mean())
        own, total = (
            {k.removeprefix("conformal."): t for k, t in sums.items() if k.startswith("conformal.")}
            for sums in (model.calibration, model.broadcast.calibration)
        )
        for kind, options in KINDS.items():
            for empty in (True, False):
                one = Conformal(**options, empty=empty)
                sums = one.chosen(own, total)
                inside = one.region(sums, made, COVERAGE)
                row = {
                    "kind": kind,
                    "raw": empty,
                    "calibration": float(sums["examples"]),
                    "covered": int(inside.gather(1, y[:, None]).sum()),
                    "size": float(inside.sum(1).double().mean()),
                }
                rows.append(common | row)
    return rows


def bands(row: dict[str, Any]) -> dict[str, bool]:
    """Return within which bands the number of covered test samples lies."""
    tests, covered = row["tests"], row["covered"]
    low, high = stats.binom.interval(BAND, tests, COVERAGE)
    n = round(row["calibration"])
    k = int(np.ceil(COVERAGE * (n + 1) - 1e-9))
    exact = stats.betabinom(tests, k, n + 1 - k)
    return {
        "binomial": bool(low <= covered <= high),
        "not below": bool(covered >= stats.binom.ppf(1 - BAND, tests, COVERAGE)),
        "beta-binomial": bool(exact.ppf((1 - BAND) / 2) <= covered <= exact.ppf((1 + BAND) / 2)),
        "beta-binomial, not below": bool(covered >= exact.ppf(1 - BAND)),
    }
