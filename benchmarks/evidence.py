"""Does calibration decay with rounds? Sites beside posteriors that become the next prior.

    python benchmarks/evidence.py [--setting digits | small | dirichlet] [--seeds 3]

``digits`` is quick; ``small`` and ``dirichlet`` are Fashion-MNIST with five classes per client and
with Dirichlet shares, for 300 rounds. Each run is ``bfl run METHOD`` with the flags of its row,
evaluated on test samples; nothing is chosen on them. Runs that ``--out`` holds already are not
repeated.
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

import bflcore

SMALL = {"data": "fashion-mnist", "train_per_class": 50, "test_per_class": 950, "clients": 10}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "clients": 10, "rounds": 120, "eval_every": 20},
    "small": {**SMALL, "partition": "labels:5", "rounds": 300, "eval_every": 100},
    "dirichlet": {
        "data": "fashion-mnist",
        "partition": "dirichlet:0.5",
        "clients": 10,
        "rounds": 300,
        "eval_every": 100,
    },
}
# Flags, and options of ``-o``.
RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "pvi": ("pvi", {}, {}),
    "pvi, tempered": ("pvi", {}, {"inference.kl_weight": 0.3}),
    "fedvi": ("fedvi", {}, {}),
    "fedvi, continual": ("fedvi", {"hyper": "continual"}, {}),
    "bpfed": ("bpfed", {}, {}),
    "one client": ("pvi", {"clients": 1}, {"inference.damping": 1.0}),  # centralised VI
}
SHOWN = ("ece", "nll", "accuracy")
SHOWN_ROUNDS = {"digits": (20, 60, 120), "small": (100, 200, 300), "dirichlet": (100, 200, 300)}


def trained(setting: str, recipe: str, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of each evaluated round."""
    method, flags, options = RECIPES[recipe]
    rows: list[dict[str, Any]] = []

    def note(number: int, loss: float, record: dict[str, Any] | None) -> None:
        if record is not None:
            found = {name: pooled(record[f"personal.{name}"]) for name in SHOWN}
            row = {"setting": setting, "recipe": recipe, "seed": seed, "round": number}
            rows.append({**row, "loss": loss, **found})

    out = Path(tempfile.mkdtemp())
    given = {**SETTINGS[setting], "workers": 1, "ood": "none", "seed": seed, **flags}
    options = {**options, "engine.chunk": 10 if setting == "digits" else 1}
    try:
        bflcore.run(method, out=out / "run", progress=note, options=options, **given)
    finally:
        shutil.rmtree(out)
    return rows


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

    The last column of each metric is its change from the middle round to the last, seed by seed.
    """
    found = {
        (row["recipe"], row["seed"], row["round"]): row for row in rows if row["setting"] == setting
    }
    numbers = SHOWN_ROUNDS[setting]
    *_, middle, last = numbers
    columns = [*(f"round {number}" for number in numbers), f"{middle} to {last}"]
    titles = [f"{name}, {column}" for name in SHOWN for column in columns]
    lines = [f"| recipe | seeds | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for recipe in dict.fromkeys(recipe for recipe, _, _ in found):
        seeds = sorted({seed for name, seed, number in found if (name, number) == (recipe, last)})
        cells = []
        for name in SHOWN:
            values = {n: [found[recipe, seed, n][name] for seed in seeds] for n in numbers}
            change = [b - a for a, b in zip(values[middle], values[last], strict=True)]
            cells += [spread(values[number]) for number in numbers]
            cells.append(spread(change, "+"))
        lines.append(f"| {recipe} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


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


if __name__ == "__main__":
    main()
