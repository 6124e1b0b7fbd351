"""Does calibration decay with rounds? Sites beside posteriors that become the next prior.

    python benchmarks/evidence.py [--setting digits | small | dirichlet] [--seeds 3]

``digits`` is quick; ``small`` and ``dirichlet`` are Fashion-MNIST with five classes per client and
with Dirichlet shares, for 300 rounds of three local epochs. Each run is ``bfl run METHOD`` with the
flags of its row, evaluated on test samples; nothing is chosen on them. ``centralised`` is the same
inference on the pooled training samples of the same federation. Runs that ``--out`` holds already
are not repeated.

The evidence lower bound is E_q[log p(y | x, w)] - KL(q || N(0, 1)) per training sample, in nats,
with 20 draws of w: for methods whose server holds the whole posterior and whose prior is N(0, 1).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch.distributions import Normal, kl_divergence

import bflcore
from bflcore.api.flags import resolve_flags
from bflcore.api.given import own_data
from bflcore.data.sources import FashionMNIST
from bflcore.data.user import MEMORY
from bflcore.experiments.prepare import prepare
from bflcore.problem import Problem
from bflcore.registry.loading import load_registry

LONG = {"clients": 10, "rounds": 300, "local_epochs": 3, "eval_every": 100}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "clients": 10, "rounds": 120, "eval_every": 20},
    "small": {
        **LONG,
        "data": "fashion-mnist",
        "partition": "labels:5",
        "train_per_class": 50,
        "test_per_class": 950,
    },
    # 2,500 of 12,000 images are for training, as in the small split.
    "dirichlet": {**LONG, "partition": "dirichlet:0.5", "test_fraction": 0.792},
}
# Flags, and options of ``-o``.
RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "pvi": ("pvi", {}, {}),
    "pvi, tempered": ("pvi", {}, {"inference.kl_weight": 0.3}),
    "fedvi": ("fedvi", {}, {}),
    "fedvi, continual": ("fedvi", {"hyper": "continual"}, {}),
    "bpfed": ("bpfed", {}, {}),
    "fedsi": ("fedsi", {}, {}),
    "centralised": ("pvi", {}, {"inference.damping": 1.0}),
}
BOUNDED = ("pvi", "centralised")  # untempered, under N(0, 1)
DRAWS = 20
# Flags that divide the data, which those in one place do not need.
DIVIDING = ("partition", "clients", "train_per_class", "test_per_class", "test_fraction")
SHOWN = ("ece", "nll", "accuracy")
SHOWN_ROUNDS = {"digits": (20, 60, 120), "small": (100, 200, 300), "dirichlet": (100, 200, 300)}
SINCE = {"digits": 60, "small": 100, "dirichlet": 100}  # round from which a change is shown


def trained(setting: str, recipe: str, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of each evaluated round, and the bound of the last one."""
    method, flags, options = RECIPES[recipe]
    rows: list[dict[str, Any]] = []

    def note(number: int, loss: float, record: dict[str, Any] | None) -> None:
        if record is not None:
            found = {name: pooled(record[f"personal.{name}"]) for name in SHOWN}
            row = {"setting": setting, "recipe": recipe, "seed": seed, "round": number}
            row["dropped"] = len(record["dropped"])  # since the last evaluation
            rows.append({**row, "loss": loss, **found})

    given = {**federation(setting, seed), "workers": 1, "ood": "none", "seed": seed, **flags}
    problem = divided(given)
    if recipe == "centralised":
        given = {name: value for name, value in given.items() if name not in DIVIDING}
        given["data"] = in_one_place(problem)
    out = Path(tempfile.mkdtemp())
    options = {**options, "engine.chunk": 10 if setting == "digits" else 1}
    try:
        run = bflcore.run(method, out=out / "run", progress=note, options=options, **given)
        if recipe in BOUNDED:
            rows[-1]["bound"] = lower_bound(run, problem, seed)
    finally:
        shutil.rmtree(out)
    return rows


def federation(setting: str, seed: int) -> dict[str, Any]:
    """Return the flags of a setting, with its data where they are a subset."""
    given = SETTINGS[setting]
    if "data" in given:
        return given
    whole = FashionMNIST().load()
    rows = np.random.default_rng(seed).permutation(len(whole.y))[:12_000]
    return {**given, "data": {"x": whole.x[rows], "y": whole.y[rows]}}


def divided(given: dict[str, Any]) -> Problem:
    """Return the samples of every client of a federation."""
    own, flags = None, given
    if not isinstance(given["data"], str):
        own, flags = own_data(given["data"], given | {"data": MEMORY})
    return prepare(resolve_flags(load_registry(), "fedavg", {}, flags, []), own).problem


def in_one_place(problem: Problem) -> dict[str, np.ndarray[Any, Any]]:
    """Return the samples of all clients as those of one."""
    found = {}
    for end, shares in (("", problem.train), ("_test", problem.test)):
        found[f"x{end}"], found[f"y{end}"] = shares.x.numpy(), shares.y.numpy()
        found[f"client{end}"] = np.zeros(len(shares.y), int)
    return found


def lower_bound(run: bflcore.Run, problem: Problem, seed: int) -> float:
    """Return the evidence lower bound of the server's posterior, per training sample, in nats."""
    posterior = run.server.posterior
    means, variances = posterior["mean"], posterior["variance"]
    divergence = sum(
        float(kl_divergence(Normal(means[name], variances[name].sqrt()), Normal(0.0, 1.0)).sum())
        for name in means
    )
    x, y, network = problem.train.x, problem.train.y, run.server.module()
    total = 0.0
    with torch.no_grad():
        for draw in run.server.sample(DRAWS, seed):
            outputs = torch.func.functional_call(network, draw, (x,))
            total -= float(torch.nn.functional.cross_entropy(outputs, y, reduction="sum"))
    return (total / DRAWS - divergence) / len(y)


def pooled(value: Any) -> float:
    """Return a metric over all clients' samples counted alike."""
    return float(value["pooled"])


def missing(
    path: Path, setting: str, recipes: list[str], seeds: range
) -> Iterator[tuple[str, int]]:
    """Yield the runs that the file does not hold."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    done = {(r["setting"], r["recipe"], r["seed"]) for r in map(json.loads, lines)}
    for seed in seeds:
        yield from ((r, seed) for r in recipes if (setting, r, seed) not in done)


def table(rows: list[dict[str, Any]], setting: str) -> str:
    """Return the Markdown table of a setting: means over seeds and their standard errors.

    The last column of each metric is its change since a round that `SINCE` names, seed by seed.
    """
    found = {
        (row["recipe"], row["seed"], row["round"]): row for row in rows if row["setting"] == setting
    }
    numbers = SHOWN_ROUNDS[setting]
    last, since = numbers[-1], SINCE[setting]
    columns = [*(f"round {number}" for number in numbers), f"{since} to {last}"]
    titles = [f"{name}, {column}" for name in SHOWN for column in columns]
    lines = [f"| recipe | seeds | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for recipe in dict.fromkeys(recipe for recipe, _, _ in found):
        seeds = sorted({seed for name, seed, number in found if (name, number) == (recipe, last)})
        cells = []
        for name in SHOWN:
            values = {n: [found[recipe, seed, n][name] for seed in seeds] for n in numbers}
            change = [b - a for a, b in zip(values[since], values[last], strict=True)]
            cells += [spread(values[number]) for number in numbers]
            cells.append(spread(change, "+"))
        lines.append(f"| {recipe} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bounds(rows: list[dict[str, Any]], setting: str) -> str:
    """Return the lower bounds as a Markdown table, with the gap to pooled samples seed by seed."""
    found = {
        (row["recipe"], row["seed"]): row["bound"]
        for row in rows
        if row["setting"] == setting and "bound" in row
    }
    lines = ["| recipe | seeds | lower bound per sample | below centralised |", "|---|---|---|---|"]
    for recipe in dict.fromkeys(recipe for recipe, _ in found):
        seeds = sorted(s for name, s in found if name == recipe and ("centralised", s) in found)
        gaps = [found["centralised", seed] - found[recipe, seed] for seed in seeds]
        level = spread([found[recipe, seed] for seed in seeds])
        lines.append(f"| {recipe} | {len(seeds)} | {level} | {spread(gaps)} |")
    return "\n".join(lines) if found else ""


def spread(values: list[float], sign: str = "") -> str:
    """Return mean and standard error as text; `sign` is "+" or nothing."""
    if len(values) < 2:
        return f"{values[0]:{sign}.4f}" if values else ""
    return f"{mean(values):{sign}.4f} +- {stdev(values) / len(values) ** 0.5:.4f}"


def main() -> None:
    """Run what is missing, one JSON line per evaluated round, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=Path("docs/results/evidence.json"))
    given = parser.parse_args()
    for recipe, seed in missing(given.out, given.setting, given.recipes, range(given.seeds)):
        lines = [json.dumps(row) + "\n" for row in trained(given.setting, recipe, seed)]
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    rows = [json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]
    print(table(rows, given.setting))
    print(f"\n{bounds(rows, given.setting)}")


if __name__ == "__main__":
    main()
