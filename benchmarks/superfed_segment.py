"""Accuracy along the segment: SuPerFed's ends against ends that were trained independently.

    python benchmarks/superfed_segment.py RUNS/mnist5k-superfed-mm RUNS/mnist5k-fedavg

The first run gives the trained segment. The other ends are the second run's model and, for each
client, a network of another random start trained on its samples alone for as many epochs as a
client trains its local model on average.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import attrs
import torch

from bfl_superfed import prediction, subspace
from bflcore import Broadcast, Map, Point, metrics
from bflcore.checkpoint import Checkpoints
from bflcore.experiment import resolve
from bflcore.registry import load_registry
from bflcore.report.reading import read_run
from bflcore.runs import prepare

CLIENTS = 20  # the first ones
EPOCHS = 60  # six visits in 60 personalised rounds of 5 of 50 clients, 10 epochs each


def main() -> None:
    """Print the mean over clients for every lambda, one JSON line a segment and figure."""
    torch.set_num_threads(1)
    trained, plain = map(Path, sys.argv[1:3])
    run = read_run(trained)
    problem = prepare(resolve(load_registry(), run.summary["method"], run.experiment, {})).problem
    points = run.evaluation["curves"]["lambda"]["clients"][:CLIENTS]
    for name in ("accuracy", "nll"):
        report("trained together", name, [client[name] for client in points])

    saved = Checkpoints(plain / "checkpoint").read(Point)
    assert saved is not None, "the run has no checkpoint"  # noqa: S101
    server = saved.broadcast.start
    alone = Map(
        optimiser="sgd",
        momentum=0.9,
        weight_decay=1e-4,
        lr=0.01,
        local_epochs=EPOCHS,
        batch_size=10,
    )
    found = []
    for client in problem.clients[:CLIENTS]:
        cohort = problem.cohort([client], {}, 0)
        empty = {
            subspace.LOCAL: torch.zeros(1, problem.layout.total),
            subspace.STARTED: torch.zeros(1),
        }
        begun = subspace.with_local_models(problem, attrs.evolve(cohort, memory=empty))
        start = Point(begun[subspace.LOCAL][0])
        local = alone.fit(problem, Broadcast(0, start, start), cohort).posterior.mean
        memory = begun | {subspace.LOCAL: local}
        x, y = problem.test.of(client)
        curve = prediction.along_the_segment(problem, server, memory, x[None])
        sums = (metrics.classification_sums(p.draws[0], y) for p in curve.values())
        found.append([metrics.figures(one) for one in sums])
    for name in ("accuracy", "nll"):
        report("trained independently", name, [[at[name] for at in one] for one in found])


def report(segment: str, figure: str, clients: list[list[float]]) -> None:
    """Print the mean over clients and its standard deviation along the segment."""
    means = [statistics.mean(column) for column in zip(*clients, strict=True)]
    rounded = [round(mean, 4) for mean in means]
    spread = round(statistics.pstdev(means), 4)
    print(json.dumps({"segment": segment, figure: rounded, "spread": spread}))


if __name__ == "__main__":
    main()
