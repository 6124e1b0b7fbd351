"""EM-TDAMP beside Adam with the best of a grid of learning rates: curves, one line a contestant.

    python benchmarks/tdamp_training.py boston --seeds 8 --rounds 100
    python benchmarks/tdamp_training.py mnist5k --seeds 1 --rounds 15
    python benchmarks/tdamp_training.py mnist5k --clients 10 --sweeps 10 --rounds 15

Prints the mean over seeds of the test error (normalised mean squared, or share of wrong labels)
after some rounds; one round is `--sweeps` passes over every client's data. Adam is the method
`fedavg`, which with one client is Adam (its moments restart each round).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bflcore.experiment import resolve
from bflcore.registry import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.runs import Prepared, prepare

ROUNDS = (1, 3, 5, 10, 15, 20, 50, 100)  # those that are printed
NETS = {"boston": [64, 64], "mnist5k": [128], "fashion-mnist": [128]}
BATCH = {"boston": 101}
RATES = (1e-3, 3e-3, 1e-2, 2e-2)


def prepared(arguments: argparse.Namespace, method: str, seed: int, **inference: Any) -> Prepared:
    """Return one contestant's run."""
    file = {
        "seed": seed,
        "data": {
            "data": arguments.data,
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
    return prepare(resolve(load_registry(), method, file, {}))


def curve(run: Prepared, rounds: int) -> list[dict[str, float]]:
    """Return the server's figures on all test samples after every round."""
    experiment, problem = run.experiment, run.problem
    recipe = Recipe(
        experiment.inference, experiment.aggregator, experiment.weighting, experiment.hyper
    )
    broadcast, found = begin(recipe, problem), []
    with experiment.engine.open(problem, experiment.inference, 15) as session:
        for _ in range(rounds):
            broadcast = run_round(recipe, session, broadcast, problem.clients).broadcast
            found.append(figures(run, broadcast.start))
    return found


def figures(run: Prepared, posterior: Any) -> dict[str, float]:
    """Return the metrics of a posterior over all test samples."""
    from bflcore import metrics

    problem = run.problem
    x, y = problem.test.x, problem.test.y
    found = run.experiment.inference.predict(problem, posterior, {}, x[None], [])
    draws = found.draws[0]
    if found.noise is None:
        return metrics.figures(metrics.classification_sums(draws, y, 15))
    variance = draws.var(0, correction=0) + found.noise
    return metrics.figures(metrics.regression_sums(draws.mean(0), variance, y))


def main() -> None:
    """Run every contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(NETS))
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--sweeps", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--test-fraction", type=float, default=0.2016)
    arguments = parser.parse_args()
    adam = [(f"Adam {rate:g}", "fedavg", {"lr": rate}) for rate in RATES]
    tdamp = [
        (f"EM-TDAMP {predictive}", "em-tdamp", {"predictive": predictive})
        for predictive in ("moments", "mean")
    ]
    for label, method, options in adam + tdamp:
        runs = [
            curve(prepared(arguments, method, seed, **options), arguments.rounds)
            for seed in range(arguments.seeds)
        ]
        errors = [[f["nmse"] if "nmse" in f else 1 - f["accuracy"] for f in run] for run in runs]
        mean = np.mean(errors, 0)
        last = {
            key: np.mean([run[-1][key] for run in runs])
            for key in ("nll", "ece")
            if key in runs[0][-1]
        }
        print(
            f"{label:18s}",
            *(f"{n}: {mean[n - 1]:.4f}" for n in ROUNDS if n <= arguments.rounds),
            *(f"{key} {value:.4f}" for key, value in last.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
