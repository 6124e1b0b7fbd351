"""Time of an epoch: EM-TDAMP against Adam on the same net and minibatches, and K = 10 against 1.

    python benchmarks/tdamp_epoch.py

The contestants alternate in one process, so that other load meets both; medians of ratios.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from tdamp_training import prepared

from bflcore.experiments.prepare import Prepared
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import surveyed

REPEATS = 9


def seconds(run: Prepared, clients: int) -> float:
    """Return the time of one `fit` of the first clients as one cohort."""
    import torch

    inference = run.experiment.inference
    problem = surveyed(inference, run.problem)
    broadcast = begin(Recipe(inference, None, None, None), problem)  # type: ignore[arg-type]
    chosen = list(range(clients))
    memory = {n: torch.stack([t] * clients) for n, t in inference.initial_memory(problem).items()}
    cohort = problem.cohort(chosen, memory, 0)
    clock = time.perf_counter()
    inference.fit(problem, broadcast, cohort)
    return time.perf_counter() - clock


def main() -> None:
    """Print both ratios."""
    whole = argparse.Namespace(data="mnist5k", clients=1, sweeps=1, test_fraction=0.2)
    tenth = argparse.Namespace(data="mnist5k", clients=10, sweeps=1, test_fraction=0.2)
    tdamp, adam = prepared(whole, "em-tdamp", 0), prepared(whole, "fedavg", 0)
    many = prepared(tenth, "em-tdamp", 0)
    ratios = [(seconds(tdamp, 1) / seconds(adam, 1), seconds(many, 10) / seconds(many, 1))
              for _ in range(REPEATS)]  # fmt: skip
    print(f"an epoch of 4,000 samples, K = 1, against Adam's: {median(r for r, _ in ratios):.2f}")
    print(f"10 clients of 400 samples in one batch, against 1: {median(r for _, r in ratios):.2f}")


if __name__ == "__main__":
    main()
