"""EM-TDAMP beside Adam with the best of a grid of learning rates: curves, one line a contestant.

    python benchmarks/tdamp_training.py boston --seeds 8 --rounds 100
    python benchmarks/tdamp_training.py mnist5k --seeds 1 --rounds 15
    python benchmarks/tdamp_training.py mnist5k --clients 10 --sweeps 10 --rounds 15
    python benchmarks/tdamp_training.py fashion-mnist --rounds 2

Fashion-MNIST has its own 60,000 training and 10,000 test images; the others are divided anew by
every seed. Prints the mean over seeds of the test error (normalised mean squared, or share of
wrong labels) after some rounds, where one round is `--sweeps` passes over every client's data; with
`--paired`, also how much the last round's error and NLL differ from those of Adam with this rate,
paired by seed, with the standard error. Adam is the method `fedavg`, which with one client is Adam
(its moments restart each round). EM-TDAMP is trained once and read twice: with propagated moments
and with posterior means alone. Seconds are those of the training of one seed, without its
predictions. With `--validate`, everything is trained on four fifths of each client's training
samples and measured on the others: for choices.
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
from bflcore.errors import RoundError
from bflcore.experiments.prepare import Prepared, prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.surveys import survey
from bflcore.problem import Shares
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round

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
    parser.add_argument("--validate", action="store_true", help="measure on training samples")
    parser.add_argument("--paired", type=float, help="rate of the Adam to compare with, by seed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.data == "fashion-mnist":
            arguments.file = own_split(Path(folder))
        compare(arguments)


def held_out(run: Prepared, seed: int) -> Prepared:
    """Return the run with a fifth of each client's training samples in place of the test samples.

    They are drawn by the seed, and are not trained on.
    """
    problem, noise = run.problem, np.random.default_rng(seed)
    orders = [
        problem.train.start[client] + noise.permutation(problem.train.size(client))
        for client in range(len(problem.train.start))
    ]
    train, test = (
        Shares.gather(problem.train.x, problem.train.y, rows)
        for rows in ([o[len(o) // 5 :] for o in orders], [o[: len(o) // 5] for o in orders])
    )
    return attrs.evolve(run, problem=attrs.evolve(problem, train=train, test=test))


def compare(arguments: argparse.Namespace) -> None:
    """Print a line for every contestant."""
    readings = {f" {name}": {"predictive": name} for name in ("moments", "mean")}
    adam = [(f"Adam {rate:g}", "fedavg", {"lr": rate}, {"": {}}) for rate in arguments.rates]
    contestants = [*adam, ("EM-TDAMP", "em-tdamp", {}, readings)]
    table(arguments, contestants, f"Adam {arguments.paired:g}" if arguments.paired else "")


def table(
    arguments: argparse.Namespace,
    contestants: list[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]],
    reference: str,
) -> None:
    """Print a line for every contestant: label, method, its options, and ways to predict.

    Differences are from the line `reference`, once it is there.
    """
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    shown = [n for n in ROUNDS if n <= arguments.rounds]
    known: dict[str, list[list[dict[str, float]]]] = {}
    for label, method, options, ways in contestants:
        seconds = 0.0
        for seed in seeds:
            rows, taken = curve(arguments, method, seed, options, ways)
            seconds += taken
            for way, row in rows.items():
                known.setdefault(label + way, []).append(row)
        for name in (label + way for way in ways):
            print(line(known[name], shown, known.get(reference), name),
                  f"{seconds / len(seeds):.1f} s", flush=True)  # fmt: skip


def curve(
    arguments: argparse.Namespace,
    method: str,
    seed: int,
    options: dict[str, Any],
    ways: dict[str, dict[str, Any]],
) -> tuple[dict[str, list[dict[str, float]]], float]:
    """Return the metrics after some rounds for each way to predict, and the seconds of training.

    A run in which every client failed has an error of NaN from then on.
    """
    run, seconds = prepared(arguments, method, seed, **options), 0.0
    if getattr(arguments, "validate", False):
        run = held_out(run, seed)
    shown = [n for n in ROUNDS if n <= arguments.rounds]
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    try:
        for done, (broadcast, taken) in enumerate(train(run, arguments.rounds), 1):
            seconds += taken
            if done in shown:
                for way, reading in ways.items():
                    rows[way].append(figures(run, broadcast, **reading))
    except RoundError:
        failed = dict.fromkeys(("accuracy", "nll"), float("nan"))
        for row in rows.values():
            row.extend([failed] * (len(shown) - len(row)))
    return rows, seconds


def line(
    runs: list[list[dict[str, float]]],
    shown: list[int],
    reference: list[list[dict[str, float]]] | None,
    name: str,
) -> str:
    """Return means over seeds, and paired differences from the reference in the last round."""
    errors = np.mean([[error(row) for row in rows] for rows in runs], 0)
    parts = [f"{name:20s}", *(f"{n}: {value:.4f}" for n, value in zip(shown, errors, strict=True))]
    parts += [
        f"{key} {np.mean([rows[-1].get(key, np.nan) for rows in runs]):.4f}"
        for key in ("nll", "ece")
        if key in runs[0][-1]
    ]
    if reference is not None and reference is not runs and len(runs) > 1:
        for key, of in (("error", error), ("nll", lambda row: row["nll"])):
            gaps = [of(a[-1]) - of(b[-1]) for a, b in zip(runs, reference, strict=True)]
            spread = np.std(gaps, ddof=1) / len(gaps) ** 0.5
            parts.append(f"{key} {np.mean(gaps):+.4f} +- {spread:.4f}")
    return " ".join(parts)


def error(row: dict[str, float]) -> float:
    """Return the normalised squared error, or the share of wrong labels."""
    return row["nmse"] if "nmse" in row else 1 - row["accuracy"]


if __name__ == "__main__":
    main()
