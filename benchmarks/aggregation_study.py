"""The aggregation study on a smaller problem: fusion rules x divisions of the data x local epochs.

Fischer, Orescanin, Loomis & McClure 2024 train a ResNet-20 on CIFAR-10; here an MLP is trained on
a part of Fashion-MNIST, which takes one core about forty minutes. Finished runs are skipped, so the
study may be stopped and started again:

    python benchmarks/aggregation_study.py              # runs below runs/aggregation-study
    python benchmarks/aggregation_study.py --report     # only gather what is finished

Writes docs/results/aggregation-study.csv and .svg, and prints the tables of the page beside them.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from bflcore.data.sources import FashionMNIST
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import execute
from bflcore.registry.loading import Registry, load_registry
from bflcore.report.plots import COLOURS, GREY, NAMES, STYLE

ROOT = Path("runs/aggregation-study")
RESULTS = Path("docs/results/aggregation-study")
CLIENTS, TRAIN, TEST = 10, 500, 300  # samples a client
RULES = ("nwa", "ws", "lp", "llp", "conflation", "wc")
REFERENCES = ("mc-dropout", "fedavg")
DIVISIONS = ("iid", "shards:2", "dirichlet:0.5")
ROUNDS = {1: 60, 5: 15, 60: 5}  # rounds by local epochs
LONG = 60  # local epochs that some rules see, on the first division with the first seed
SEEDS = (0, 1)
METRICS = ("accuracy", "nll", "ece")
DRAWN = ("accuracy", "ece")
VARIATIONAL = {"initial_sigma": 0.0486, "prior_sigma": 1.0, "kl_weight": 1.0}
DRAWS = 10  # per prediction
CONSOLIDATION = {"rules": ("dwc", "conflation"), "local_epochs": 100, "pretrain": 0.1}

# The last round that counts as early, and how many evaluated rounds are late.
EARLY = {"E=1": (15, 3), "E=5": (4, 3), "E=60": (1, 1), "consolidation": (0, 1)}
# Rules whose variance shrinks with every fusion: cold; those that keep it: warm.
LOOKS = {
    "nwa": (COLOURS[4], "-"),
    "lp": (COLOURS[1], "-"),
    "llp": (COLOURS[3], "--"),
    "ws": (COLOURS[5], "-"),
    "conflation": (COLOURS[0], "-"),
    "wc": (COLOURS[2], ":"),
    "mc-dropout": (GREY, "--"),
    "fedavg": (GREY, ":"),
}
# (setting, division, rule) -> evaluated rounds [R], figures [seeds, R, metrics]
Curves = dict[tuple[str, str, str], tuple[Any, Any]]


@attrs.frozen
class Cell:
    """One run: a rule (or a reference method) in one setting."""

    rule: str
    division: str
    epochs: int
    seed: int
    pretrain: float = 0.0

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        kind = "consolidation" if self.pretrain else f"E{self.epochs}"
        return ROOT / f"{self.division.replace(':', '-')}-{kind}-{self.rule}-{self.seed}"

    def settings(self) -> tuple[str, dict[str, Any]]:
        """Return the method and what `experiment.toml` would say."""
        inference: dict[str, Any] = {"local_epochs": self.epochs, "lr": 2e-3}
        method = self.rule if self.rule in REFERENCES else "fedvi"
        file: dict[str, Any] = {
            "rounds": 1 if self.pretrain else ROUNDS[self.epochs],
            "pretrain": self.pretrain,
            "eval_every": 3 if self.epochs == 1 else 1,
            "seed": self.seed,
            "data": {
                "data": str(data(self.seed)),
                # The file names each sample's owner where clients of equal size need it.
                "partition": "natural" if "dirichlet" in self.division else self.division,
                "clients": CLIENTS,
                "test_fraction": TEST / (TRAIN + TEST),
            },
            "model": {"name": "mlp", "hidden": [32]},
            "engine": {"workers": 1},
        }
        if method == "fedvi":
            inference |= VARIATIONAL | {"predict_draws": DRAWS}
            file["aggregator"] = {"name": self.rule}
        else:
            inference |= {"lr_decay": 0.04, "lr_decay_after": 50}
        return method, {**file, "inference": inference}


def cells() -> Iterator[Cell]:
    """Yield every run, seed after seed: the study is complete in small before it is repeated."""
    for seed in SEEDS:
        for epochs in ROUNDS:
            if epochs == LONG:
                few = ("nwa", "ws", "lp", "conflation") if seed == SEEDS[0] else ()
                yield from (Cell(rule, DIVISIONS[0], epochs, seed) for rule in few)
                continue
            for division in DIVISIONS:
                for rule in (*RULES, *REFERENCES):
                    yield Cell(rule, division, epochs, seed)
        for division in DIVISIONS:
            for rule in CONSOLIDATION["rules"]:
                yield Cell(
                    rule, division, CONSOLIDATION["local_epochs"], seed, CONSOLIDATION["pretrain"]
                )


def data(seed: int, concentration: float = 0.5) -> Path:
    """Write the study's share of Fashion-MNIST, as many images of every class; return its path.

    `client` divides them into clients of equal size whose class proportions are drawn from
    Dirichlet(`concentration`), as the study has it; the partition ``dirichlet`` of the core, which
    this replaces, draws sizes too. The images of a seed are always the same.
    """
    name = f"fashion-mnist-{seed}" + ("" if concentration == 0.5 else f"-{concentration:g}")
    path = ROOT / f"{name}.npz"
    if path.exists():
        return path
    whole = FashionMNIST().load()
    rng = np.random.default_rng(seed)
    each = CLIENTS * (TRAIN + TEST) // whole.classes
    chosen = np.concatenate(
        [rng.permutation(np.flatnonzero(whole.y == c))[:each] for c in range(whole.classes)]
    )
    y = whole.y[chosen]
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.round(whole.x[chosen] * 255).astype(np.uint8)
    np.savez_compressed(path, x=pixels, y=y, client=equal_dirichlet(y, concentration, rng))
    return path


def equal_dirichlet(y: Any, concentration: float, rng: np.random.Generator) -> Any:
    """Return the owner of each sample: equal sizes, class proportions from Dirichlet.

    Clients take turns; each draws a class by its own proportions among those not yet used up.
    """
    left = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(y.max() + 1)]
    proportions = rng.dirichlet([concentration] * len(left), CLIENTS)
    owner = np.empty(len(y), np.int64)
    for turn in range(len(y)):
        client = turn % CLIENTS
        weights = proportions[client] * [bool(samples) for samples in left]
        if not weights.sum():  # nothing is left of its classes
            weights = np.array([float(len(samples)) for samples in left])
        drawn = rng.choice(len(left), p=weights / weights.sum())
        owner[left[drawn].pop()] = client
    return owner


def run(registry: Registry, cell: Cell) -> None:
    """Run a cell unless it is finished; what was interrupted starts again."""
    if (cell.folder / "summary.json").exists():
        return
    shutil.rmtree(cell.folder, ignore_errors=True)
    clock = time.perf_counter()
    prepared = prepare(resolve(registry, *cell.settings(), {}))
    execute(prepared, RunDirectory.create(cell.folder, prepared, registry))
    print(f"{cell.folder.name}: {time.perf_counter() - clock:.1f} s", flush=True)


def curve(cell: Cell) -> list[dict[str, Any]]:
    """Return the figures of each evaluated round of a finished run."""
    lines = (cell.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {
            "division": cell.division,
            "setting": "consolidation" if cell.pretrain else f"E={cell.epochs}",
            "rule": cell.rule,
            "seed": cell.seed,
            "round": record["round"],
            **{name: round(record[f"global.{name}"]["pooled"], 4) for name in METRICS},
        }
        for record in map(json.loads, lines)
    ]


def main() -> None:
    """Run what is missing, then gather."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--report", action="store_true", help="gather only")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the seeds")
    given = parser.parse_args()
    wanted = [cell for cell in cells() if cell.seed in SEEDS[: given.seeds]]
    if not given.report:
        registry = load_registry()
        for cell in wanted:
            run(registry, cell)
    rows = [row for c in wanted if (c.folder / "summary.json").exists() for row in curve(c)]
    gather(rows)


def gather(rows: list[dict[str, Any]]) -> None:
    """Write every figure and the picture; print the tables."""
    with RESULTS.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    curves = stacked(rows)
    draw(curves)
    for setting, division in dict.fromkeys((s, d) for s, d, _ in curves):
        print("\n" + table(curves, setting, division))


def stacked(rows: list[dict[str, Any]]) -> Curves:
    """Return, by setting, division and rule, the evaluated rounds and the figures there."""
    runs: dict[Any, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        key = (row["setting"], row["division"], row["rule"])
        runs.setdefault(key, {}).setdefault(row["seed"], []).append(row)
    return {
        key: (
            np.array([row["round"] for row in next(iter(seeds.values()))]),
            np.array([[[row[m] for m in METRICS] for row in seed] for seed in seeds.values()]),
        )
        for key, seeds in runs.items()
    }


def table(curves: Curves, setting: str, division: str) -> str:
    """Return a Markdown table: each rule while it learns and at the end.

    Early figures average the rounds up to `EARLY`; late ones the last three evaluated, because
    single rounds of a pathological division jump. The range is that of the seeds' late accuracies.
    """
    early, late = EARLY[setting]
    first = f"early accuracy (to round {early})"
    columns = ("rule", first, "late accuracy", "range", "late NLL", "early ECE", "late ECE")
    lines = [f"{setting}, {division}", "", f"| {' | '.join(columns)} |", "|---" * 7 + "|"]
    for rule in (rule for s, d, rule in curves if (s, d) == (setting, division)):
        rounds, figures = curves[setting, division, rule]
        start = figures[:, rounds <= early].mean((0, 1))
        ends = figures[:, -late:].mean(1)  # [seeds, metrics]
        end, spread = ends.mean(0), np.ptp(ends[:, 0])
        shown = (start[0], end[0], spread, end[1], start[2], end[2])
        lines.append(f"| {rule} | " + " | ".join(f"{figure:.3f}" for figure in shown) + " |")
    return "\n".join(lines)


def draw(curves: Curves) -> None:
    """Draw the learning curves, a column a division and number of local epochs."""
    columns = [column for column in dict.fromkeys((s, d) for s, d, _ in curves) if "=" in column[0]]
    with mpl.rc_context({**STYLE, "font.size": 7, "axes.labelsize": 7}):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        axes = figure.subplots(len(DRAWN), len(columns), sharex="col")
        for column, (setting, division) in enumerate(columns):
            axes[0, column].set_title(f"{division}, {setting}")
            axes[-1, column].set_xlabel("round")
            for row, metric in enumerate(DRAWN):
                axes[row, column].locator_params(nbins=4)
                for rule, (colour, dashes) in LOOKS.items():
                    if (setting, division, rule) in curves:
                        rounds, figures = curves[setting, division, rule]
                        means = figures.mean(0)[:, METRICS.index(metric)]
                        look = {"color": colour, "ls": dashes, "lw": 1.1, "label": rule}
                        axes[row, column].plot(rounds, means, **look)
        for axis, metric in zip(axes[:, 0], DRAWN, strict=True):
            axis.set_ylabel(NAMES[metric])
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
        figure.savefig(RESULTS.with_suffix(".svg"), transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
