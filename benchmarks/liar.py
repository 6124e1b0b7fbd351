"""One liar among ten clients: the accuracy that the nine honest ones get, rule by rule.

    python benchmarks/liar.py [--rounds 10] [--seeds 3] [--trust 100]

Client 0 lies in every round in one way. The accuracy is the mean over the honest clients' own test
samples (``mnist5k``, five classes per client); the reference is the run in which client 0 is absent
from every round. Nothing is chosen on these figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import attrs
import torch

from bflcore import Broadcast, ClientError, LocalResult
from bflcore.api.flags import resolve_flags
from bflcore.engines.base import Wrapped
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.run import execute
from bflcore.registry.loading import load_registry

LIAR = 0
SETTING = {
    "data": "mnist5k",
    "clients": 10,
    "partition": "labels:5",
    "train_per_class": 30,
    "workers": 1,
}
ROBUST = ["median", "trimmed-mean", "geometric-median", "trimmed-precision-weighted-mean"]
RULES = {
    "bpfed": ["average", "log-linear-pool", *ROBUST],
    "fedvi": [
        *("average", "weighted-sum", "linear-pool", "log-linear-pool", "conflation"),
        *("weighted-conflation", "weight-consolidation", *ROBUST),
    ],
    "fedavg": ["average", *ROBUST[:-1]],
    "pvi": [""],  # the method's own rule; it runs where the method is installed
}
WEIGHTINGS = {
    "bpfed": ["equal", "examples", "distance", "max-discrepancy"],
    "fedvi": ["equal", "examples", "distance", "max-discrepancy"],
    "fedavg": ["equal", "examples"],
    "pvi": [""],
}

Lie = Callable[[LocalResult, Broadcast], "LocalResult | ClientError"]


def claim(examples: int = 0, **fields: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Lie about fields of the posterior, where the family has them, and the number of samples."""

    def lie(result: LocalResult, _: Broadcast) -> LocalResult:
        packed = result.posterior.pack()
        packed |= {name: change(packed[name]) for name, change in fields.items() if name in packed}
        counts = torch.full_like(result.examples, examples) if examples else result.examples
        return attrs.evolve(result, posterior=result.posterior.unpack(packed), examples=counts)

    return lie


def full(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that replaces every number ``[...]`` by `value`."""
    return lambda tensor: torch.full_like(tensor, value)


def lazy(result: LocalResult, broadcast: Broadcast) -> LocalResult:
    """Return the start unchanged."""
    return attrs.evolve(result, posterior=broadcast.start.map(lambda tensor: tensor[None].clone()))


def moving(factor: float, examples: int = 1) -> Lie:
    """Move the mean by `factor` times what the client learnt; claim `examples` times as many."""

    def lie(result: LocalResult, broadcast: Broadcast) -> LocalResult:
        start, packed = broadcast.start.pack(), result.posterior.pack()
        if "mean" in packed:
            packed["mean"] = start["mean"] + factor * (packed["mean"] - start["mean"])
        posterior = result.posterior.unpack(packed)
        return attrs.evolve(result, posterior=posterior, examples=examples * result.examples)

    return lie


def noisy(factor: float) -> Lie:
    """Move the mean in a random direction, `factor` times as far as the client learnt."""

    def lie(result: LocalResult, broadcast: Broadcast) -> LocalResult:
        start, packed = broadcast.start.pack(), result.posterior.pack()
        if "mean" in packed:
            moved = packed["mean"] - start["mean"]
            noise = torch.randn(
                moved.shape, generator=torch.Generator().manual_seed(broadcast.round)
            )
            packed["mean"] = start["mean"] + factor * moved.norm() * noise / noise.norm()
        return attrs.evolve(result, posterior=result.posterior.unpack(packed))

    return lie


LIES: dict[str, Lie] = {
    "absent": lambda result, _: ClientError(result.clients[0], "fit", "absent"),
    "honest": lambda result, _: result,
    "mean 7": claim(mean=full(7.0)),
    "mean 1e14": claim(mean=full(1e14)),
    "mean x -1": claim(mean=torch.neg),
    "change x -1": moving(-1.0),
    "change x -4.9": moving(-4.9),
    "noise x 4.9": noisy(4.9),
    "9 x the samples, change x -9": moving(-9.0, 9),
    "variance 1e-30": claim(variance=full(1e-30)),
    "variance 1e14": claim(variance=full(1e14)),
    "mean 7, variance 1e-30": claim(mean=full(7.0), variance=full(1e-30)),
    "1e15 samples, mean 7": claim(10**15, mean=full(7.0)),
    "lazy": lazy,
}


@attrs.frozen(eq=False)
class Lying(Wrapped):
    """A session in which one client lies in every round."""

    lie: Lie

    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[Any]:
        """Fit everybody, and replace what the liar says."""
        for reply in self.session.fit(broadcast, clients):
            if isinstance(reply, LocalResult) and reply.clients == (LIAR,):
                yield self.lie(reply, broadcast)
            else:
                yield reply


def accuracy(parts: dict[str, Any], lie: Lie) -> tuple[float, int]:
    """Return the honest clients' mean accuracy at the end, and in how many rounds 0 was refused."""
    experiment = resolve_flags(load_registry(), parts.pop("method"), {}, parts)
    prepared = prepare(experiment)
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory.create(Path(folder) / "run", prepared, load_registry())
        engine, inference = experiment.engine, experiment.inference
        with engine.open(prepared.problem, inference, experiment.run.bins) as session:
            summary = execute(prepared, directory, session=Lying(session, lie))
        found = json.loads((directory.path / "evaluation.json").read_text())
    honest = [one["accuracy"] for one in found["personal"]["clients"] if one["client"] != LIAR]
    refused = [d for d in summary["dropped"] if d["stage"] == "fit" and d["client"] == LIAR]
    return mean(honest), len(refused)


def _pairs(method: str) -> list[tuple[str, str]]:
    """Return each rule with the first weighting, and the first rule with the other weightings."""
    rules, weightings = RULES[method], WEIGHTINGS[method]
    return [(rule, weightings[0]) for rule in rules] + [(rules[0], one) for one in weightings[1:]]


def main() -> None:
    """Print one JSON line per method, rule, weighting and lie."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trust", type=float, default=100.0)
    parser.add_argument("--methods", nargs="*", default=list(RULES))
    given = parser.parse_args()
    for method in given.methods:
        for rule, weighting in _pairs(method):
            row: dict[str, list[tuple[float, int]]] = {}
            for seed, (name, lie) in itertools.product(range(given.seeds), LIES.items()):
                parts = {"method": method, "aggregator": rule, "weighting": weighting, **SETTING}
                parts |= {"rounds": given.rounds, "eval_every": given.rounds}
                parts |= {"seed": seed, "trust": given.trust}
                try:
                    row.setdefault(name, []).append(accuracy(parts, lie))
                except Exception as error:  # noqa: BLE001 - a run that ends is a result, too
                    print(json.dumps({"method": method, "lie": name, "error": str(error)[:200]}))
                    row.setdefault(name, []).append((float("nan"), 0))
            columns = {
                name: {"accuracy": round(mean(a for a, _ in found), 4), "refused": found[0][1]}
                for name, found in row.items()
            }
            print(json.dumps({"method": method, "rule": rule, "weighting": weighting, **columns}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
