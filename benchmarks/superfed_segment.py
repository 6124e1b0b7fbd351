"""The segment: SuPerFed's ends against ends that were trained independently, on the same samples.

    bfl run superfed-mm -o inference.lambda_selection=ensemble ... --out MIXED
    bfl run fedavg ... --out PLAIN
    python benchmarks/superfed_segment.py MIXED PLAIN

Both runs need the same data, seed and schedule; with `ensemble` SuPerFed holds no sample out. The
independent ends are PLAIN's model and, for each client, a network of the same random start trained
alone in the rounds in which SuPerFed trained its local model: the same samples, minibatches,
number of steps and learning rates. The federated end is the server's model, with which clients
predict, or the client's own: that of its next round, before it is averaged with others'.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor

from bfl_superfed.superfed import LowLossSubspace, initial_local_models
from bflcore import Broadcast, GradientInference, Map, Point, Problem
from bflcore.engines.client import stack
from bflcore.experiments.checkpoint import Checkpoint, Checkpoints
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.inference.memory import OwnPosterior, keep_own
from bflcore.problem import metrics
from bflcore.registry.loading import load_registry
from bflcore.report.reading import read_run
from bflcore.rounds import sample_cohort

CLIENTS = 20  # the first ones that have a local model
Memory = Mapping[str, Tensor]
Curve = list[dict[str, float]]


def main() -> None:
    """Print the mean over clients for every lambda, one JSON line a segment and figure."""
    torch.set_num_threads(1)
    mixed, plain = (saved(Path(folder)) for folder in sys.argv[1:3])
    run = read_run(Path(sys.argv[1]))
    experiment = resolve(load_registry(), run.summary["method"], run.experiment, {})
    problem, inference = prepare(experiment).problem, experiment.inference
    assert isinstance(inference, LowLossSubspace), "the first run is not SuPerFed's"  # noqa: S101
    fields = attrs.fields(GradientInference)
    same = {field.name: getattr(inference, field.name) for field in fields}
    alone = Map(**same, weight_decay=inference.weight_decay)
    found: dict[str, list[Curve]] = {}

    def add(label: str, server: Point, memory: Memory) -> None:
        x, y = problem.test.of(client)
        members = problem.cohort([client], memory, problem.rounds)
        broadcast = Broadcast(problem.rounds, server, server)
        predictions = inference.curves(problem, broadcast, members, x[None])["lambda"].values()
        sums = (metrics.classification_sums(p.draws[0], y) for p in predictions)
        found.setdefault(label, []).append([metrics.metrics_of(one) for one in sums])

    begun = [
        client
        for client, memory in sorted(mixed.memories.items())
        if OwnPosterior.unpack(memory, Point).started
    ]
    for client in begun[:CLIENTS]:
        rounds = [
            r
            for r in range(problem.rounds)
            if inference.personalises(problem, r)
            and client in sample_cohort(problem.clients, experiment.run.cohort, problem.seed, r)
        ]
        ours = stack([mixed.memories[client]])
        theirs = keep_own(ours, trained_alone(problem, inference, alone, client, rounds))
        add("together, server's", mixed.broadcast.start, ours)
        add("independent, server's", plain.broadcast.start, theirs)

        cohort = problem.cohort([client], ours, problem.rounds)
        result = inference.fit(problem, mixed.broadcast, cohort)
        add("together, own", result.posterior[0], result.memory)
        own = alone.fit(problem, plain.broadcast, cohort).posterior[0]
        once_more = [*rounds, problem.rounds]
        own_alone = trained_alone(problem, inference, alone, client, once_more)
        add("independent, own", own, keep_own(ours, own_alone))
    for segment, clients in found.items():
        for name in ("accuracy", "nll"):
            report(segment, name, [[at[name] for at in one] for one in clients])


def saved(run: Path) -> Checkpoint:
    """Return the state with which a run ended."""
    checkpoint = Checkpoints(run / "checkpoint").read(Point)
    assert checkpoint is not None, f"{run} has no checkpoint"  # noqa: S101
    return checkpoint


def trained_alone(
    problem: Problem, inference: LowLossSubspace, alone: Map, client: int, rounds: list[int]
) -> Point:
    """Return a client's network ``[1, P]`` trained in `rounds`, from its own random start."""
    nothing = stack([inference.initial_memory(problem)])
    weights = initial_local_models(problem, problem.cohort([client], nothing, 0))
    for number in rounds:
        start = Point(weights[0])
        cohort = problem.cohort([client], {}, number)
        weights = alone.fit(problem, Broadcast(number, start, start), cohort).posterior.mean
    return Point(weights)


def report(segment: str, figure: str, clients: list[list[float]]) -> None:
    """Print the mean over clients along the segment, and its standard deviation over lambdas."""
    means = [statistics.mean(column) for column in zip(*clients, strict=True)]
    inner = statistics.pstdev(means[1:])
    rounded = [round(mean, 4) for mean in means]
    spread = {"spread": round(statistics.pstdev(means), 4), "without 0": round(inner, 4)}
    print(json.dumps({"segment": segment, figure: rounded, **spread, "clients": len(clients)}))


if __name__ == "__main__":
    main()
