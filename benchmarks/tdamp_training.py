"""EM-TDAMP beside Adam with the best of a grid of learning rates: curves, one line a contestant.

    python benchmarks/tdamp_training.py boston --seeds 8 --rounds 100
    python benchmarks/tdamp_training.py mnist5k --seeds 1 --rounds 15
    python benchmarks/tdamp_training.py mnist5k --clients 10 --sweeps 10 --rounds 15
    python benchmarks/tdamp_training.py fashion-mnist --rounds 2

Fashion-MNIST has its own 60,000 training and 10,000 test images; the others are divided anew by
every seed. Prints the mean over seeds of the test error (normalised mean squared, or share of
wrong labels) after some rounds; one round is `--sweeps` passes over every client's data. Adam is
the method `fedavg`, which with one client is Adam (its moments restart each round). EM-TDAMP is
trained once and read twice: with propagated moments and with posterior means alone. Seconds are
those of the training of one seed, without its predictions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from bflcore import Broadcast
from bflcore.data.sources import FashionMNIST
from bflcore.experiments.prepare import Prepared, prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round, survey

ROUNDS = (1, 3, 5, 10, 15, 20, 50, 100)  # those that are printed
NETS = {"boston": [64, 64], "mnist5k": [128], "fashion-mnist": [128]}
BATCH = {"boston": 101}
BINS = 15  # of the calibration error
RATES = (1e-3, 3e-3, 1e-2, 2e-2)


def prepared(
    arguments: argparse.Namespace,
    method: str,
    seed: int,
    *,
    hyper: dict[str, Any] | None = None,
    **inference: Any,
) -> Prepared:
    """Return one contestant's run, with options of its hyperparameter update and inference."""
    file: dict[str, Any] = {
        "seed": seed,
        "data": {
            "data": str(getattr(arguments, "file", arguments.data)),
            "clients": arguments.clients,
            "test_fraction": arguments.test_fraction,
        },
        "model": {"name": "mlp", "hidden": NETS[arguments.data]},
        "engine": {"workers": 1},
        "inference": {
            "local_epochs": arguments.sweeps,
            "batch_size": BATCH.get(arguments.data, 100),
            **inference,
        },
    }
    if hyper:
        file["hyper"] = hyper
    return prepare(resolve(load_registry(), method, file, {}))


def own_split(folder: Path) -> Path:
    """Write Fashion-MNIST with its own split, as a user's file; return the path."""
    pool = FashionMNIST().load()
    x, y = np.round(255 * pool.x).astype(np.uint8), np.asarray(pool.y)
    path = folder / "fashion-mnist.npz"
    np.savez(path, x=x[:60_000], y=y[:60_000], x_test=x[60_000:], y_test=y[60_000:])
    return path


def train(run: Prepared, rounds: int) -> Iterator[tuple[Broadcast, float]]:
    """Yield the server's broadcast after every round, and the seconds the round took."""
    experiment, problem = run.experiment, run.problem
    recipe = Recipe(
        experiment.inference, experiment.aggregator, experiment.weighting, experiment.hyper
    )
    with experiment.engine.open(problem, experiment.inference, BINS) as session:
        known = survey(experiment.inference, problem, session).sums
        broadcast = begin(recipe, problem.surveyed(known))
        for _ in range(rounds):
            clock = time.perf_counter()
            broadcast = run_round(recipe, session, broadcast, problem.clients).broadcast
            yield broadcast, time.perf_counter() - clock


def figures(run: Prepared, broadcast: Broadcast, **reading: Any) -> dict[str, float]:
    """Return the metrics over all test samples; `reading` changes options of the inference."""
    from bflcore.problem import metrics

    problem = run.problem.surveyed(broadcast.survey)
    x, y = map(torch.cat, zip(*map(problem.test.of, problem.clients), strict=True))
    inference = attrs.evolve(run.experiment.inference, **reading)
    memory = {name: t[None] for name, t in inference.initial_memory(problem).items()}
    cohort = problem.cohort([problem.clients[0]], memory, 0)
    found = inference.predict(problem, broadcast, cohort, x[None])
    draws = found.draws[0]
    if found.noise is None:
        return metrics.metrics_of(metrics.classification_sums(draws, y, BINS))
    variance = draws.var(0, correction=0) + found.noise
    return metrics.metrics_of(metrics.regression_sums(draws.mean(0), variance, y))


def main() -> None:
    """Run every contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(NETS))
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--sweeps", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="of Adam")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--test-fraction", type=float, default=0.2016)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.data == "fashion-mnist":
            arguments.file = own_split(Path(folder))
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Print a line for every contestant."""
    adam = [(f"Adam {rate:g}", "fedavg", {"lr": rate}, {"": {}}) for rate in arguments.rates]
    readings = {f" {name}": {"predictive": name} for name in ("moments", "mean")}
    shown = [n for n in ROUNDS if n <= arguments.rounds]
    for label, method, options, ways in [*adam, ("EM-TDAMP", "em-tdamp", {}, readings)]:
        found: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ways}
        seconds = 0.0
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            run = prepared(arguments, method, seed, **options)
            for rows in found.values():
                rows.append([])
            for done, (broadcast, taken) in enumerate(train(run, arguments.rounds), 1):
                seconds += taken
                if done in shown:
                    for way, reading in ways.items():
                        found[way][-1].append(figures(run, broadcast, **reading))
        for way, runs in found.items():
            errors = np.mean([[error(row) for row in rows] for rows in runs], 0)
            last = {key: np.mean([rows[-1][key] for rows in runs]) for key in ("nll", "ece")
                    if key in runs[0][-1]}  # fmt: skip
            print(
                f"{label + way:18s}",
                *(f"{n}: {value:.4f}" for n, value in zip(shown, errors, strict=True)),
                *(f"{key} {value:.4f}" for key, value in last.items()),
                f"{seconds / arguments.seeds:.1f} s",
                flush=True,
            )


def error(row: dict[str, float]) -> float:
    """Return the normalised squared error, or the share of wrong labels."""
    return row["nmse"] if "nmse" in row else 1 - row["accuracy"]


if __name__ == "__main__":
    main()
