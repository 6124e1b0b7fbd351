"""What the aggregation study varies beside the rules: weightings, priors, pre-training, retention.

The setting is that of `aggregation_study.py` with fewer rounds and three seeds; only the last round
is evaluated. Finished runs are skipped, so the script may be stopped and started again:

    python benchmarks/aggregation_variants.py              # runs below runs/aggregation-variants
    python benchmarks/aggregation_variants.py --report     # only gather what is finished

Writes docs/results/aggregation-variants.csv and .svg, and prints the tables of
docs/results/aggregation-study.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import aggregation_study as study
import attrs
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from bflcore.engines.client import stack
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import Prepared, prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import execute
from bflcore.registry.loading import Registry, load_registry

ROOT = Path("runs/aggregation-variants")
RESULTS = Path("docs/results/aggregation-variants")
SEEDS = (0, 1, 2)
ROUNDS = 15  # of one local epoch
LONG = 40  # local epochs of the runs with a single round
DRAWS = 50  # parameter draws per prediction
SIZES = "dirichlet:0.5, sizes drawn"  # the core's partition
DIVISIONS = ("iid", "shards:2", "dirichlet:0.5", "dirichlet:5")
WEIGHTED = ("nwa", "ws", "lp", "llp", "wc")  # the rules for which weights matter
DIVERGENCES = ("max-discrepancy", "distance")
MEASURES = ("entropy", "aleatoric", "epistemic")
RETAINED = np.arange(5, 101, 5)  # per cent
SECONDS = "seconds.json"
METRICS = ("accuracy", "nll", "ece")
SHOWN = ("accuracy", "NLL", "ECE")
HALF = 50  # per cent retained, of which the table shows the accuracy
STUDENT = 4.303  # 97.5 % quantile of Student's t with two degrees of freedom
Key = tuple[str, str, str, str, float, int]  # rule, division, weighting, hyper, pretrain, epochs
Found = dict[Key, dict[str, Any]]  # metric -> its values by seed [seeds]


@attrs.frozen
class Cell:
    """One run: a rule, or a reference method, and what is varied."""

    rule: str
    division: str
    seed: int
    weighting: str = "equal"
    hyper: str = "fixed"
    pretrain: float = 0.0
    epochs: int = 1

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        values = attrs.asdict(self).values()
        return ROOT / "_".join(str(value).replace(":", "-").replace(", ", "-") for value in values)

    def settings(self) -> tuple[str, dict[str, Any]]:
        """Return the method and what `experiment.toml` would say."""
        method = self.rule if self.rule in study.REFERENCES else "fedvi"
        rounds = ROUNDS if self.epochs == 1 else 1
        inference: dict[str, Any] = {"local_epochs": self.epochs, "lr": 2e-3}
        file: dict[str, Any] = {
            "rounds": rounds,
            "eval_every": rounds,
            "checkpoint_every": rounds,
            "pretrain": self.pretrain,
            "seed": self.seed,
            "data": {
                "data": str(study.data(self.seed, 5.0 if self.division == "dirichlet:5" else 0.5)),
                "partition": {SIZES: "dirichlet:0.5"}.get(self.division, self.division),
                "clients": study.CLIENTS,
                "test_fraction": study.TEST / (study.TRAIN + study.TEST),
            },
            "model": {"name": "mlp", "hidden": [32]},
            "engine": {"workers": 1},
            "weighting": {"name": self.weighting},
        }
        if self.division in DIVISIONS[2:]:  # the file names each sample's owner
            file["data"]["partition"] = "natural"
        if method != "fedavg":
            inference["predict_draws"] = DRAWS
        if method == "fedvi":
            inference |= study.VARIATIONAL
            file |= {"aggregator": {"name": self.rule}, "hyper": {"name": self.hyper}}
        return method, {**file, "inference": inference}


def cells() -> Iterator[Cell]:
    """Yield every run, seed after seed: every table is complete in small before it is repeated."""
    for seed in SEEDS:
        for division, rule in product(DIVISIONS, (*study.RULES, *study.REFERENCES)):
            yield Cell(rule, division, seed)
        for division, rule in product(("iid", "dirichlet:0.5"), study.RULES):
            yield Cell(rule, division, seed, hyper="continual")
        for division, rule, pretrain in product(study.DIVISIONS, ("dwc", "ws"), (0.1, 0.0)):
            yield Cell(rule, division, seed, pretrain=pretrain, epochs=LONG)
        for rule, weighting in product(WEIGHTED, ("equal", "examples")):
            yield Cell(rule, SIZES, seed, weighting)
        for division, weighting, rule in product(DIVISIONS[1:], DIVERGENCES, WEIGHTED):
            yield Cell(rule, division, seed, weighting)


def run(registry: Registry, cell: Cell) -> None:
    """Run a cell unless it is finished; what was interrupted starts again."""
    if (cell.folder / SECONDS).exists():
        return
    shutil.rmtree(cell.folder, ignore_errors=True)
    clock = time.process_time()
    prepared = prepare(resolve(registry, *cell.settings(), {}))
    directory = RunDirectory.create(cell.folder, prepared, registry)
    execute(prepared, directory)
    if cell.epochs == 1 and cell.weighting == "equal":
        directory.write_json("retention.json", retention(prepared, directory))
    seconds = time.process_time() - clock
    directory.write_json(SECONDS, seconds)
    print(f"{cell.folder.name}: {seconds:.1f} s", flush=True)


@torch.no_grad()
def retention(prepared: Prepared, directory: RunDirectory) -> dict[str, list[float]]:
    """Return, by measure, the accuracy on the most certain samples for each share in `RETAINED`.

    Each sample is predicted by its own client with the server's model, as in the evaluation.
    """
    problem, inference = prepared.problem, prepared.experiment.inference
    saved = directory.checkpoints.read(type(inference.initial(problem)))
    if saved is None:
        raise SystemExit(f"{directory.path} has no checkpoint; remove it and start again")
    memory = stack([inference.initial_memory(problem)])
    hits, measured = [], []
    for client in problem.clients:
        cohort = problem.cohort([client], memory, saved.broadcast.round)
        x, y = problem.test.of(client)
        draws = inference.predict(problem, saved.broadcast, cohort, x[None]).draws[0].double()
        p = draws.mean(0)
        aleatoric = 1 - draws.square().sum(2).mean(0)
        epistemic = 1 - p.square().sum(1) - aleatoric
        hits.append(p.argmax(1) == y)
        measured.append(torch.stack([torch.special.entr(p).sum(1), aleatoric, epistemic]))
    hit = torch.cat(hits).double().numpy()
    kept = np.ceil(RETAINED / 100 * len(hit)).astype(int)
    return {
        name: (hit[np.argsort(values, kind="stable")].cumsum()[kept - 1] / kept).tolist()
        for name, values in zip(MEASURES, torch.cat(measured, 1).numpy(), strict=True)
    }


def row(cell: Cell) -> dict[str, Any]:
    """Return what the last round of a finished run gave, and its pre-trained model's accuracy."""
    lines = (cell.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    found = attrs.asdict(cell) | {"rounds": records[-1]["round"]}
    found |= {name: round(records[-1][f"global.{name}"]["pooled"], 4) for name in METRICS}
    first = records[0]
    found["pretrained"] = round(first["global.accuracy"]["pooled"], 4) if cell.pretrain else ""
    path = cell.folder / "retention.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    at = int(np.flatnonzero(RETAINED == HALF)[0])
    return found | {f"{m}{HALF}": round(kept[m][at], 4) if kept else "" for m in MEASURES}


def by_key(rows: list[dict[str, Any]]) -> Found:
    """Return every metric ``[seeds]`` of the cells of which all seeds are finished."""
    names = ("rule", "division", "weighting", "hyper", "pretrain", "epochs")
    found: dict[Any, list[dict[str, Any]]] = {}
    for one in rows:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    metrics = (*METRICS, "pretrained", *(f"{name}{HALF}" for name in MEASURES))
    return {
        key: {m: np.array([one[m] for one in each]) for m in metrics}
        for key, each in found.items()
        if len(each) == len(SEEDS)
    }


def paired(left: Any, right: Any) -> str:
    """Return the mean difference of paired values ``[seeds]`` and its standard error.

    It is in brackets if its 95 % interval contains zero.
    """
    apart = left - right
    mean, error = apart.mean(), apart.std(ddof=1) / len(apart) ** 0.5
    text = f"{mean:+.3f} ± {error:.3f}"
    return text if abs(mean) > STUDENT * error else f"({text})"


def table(title: str, columns: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table under a title."""
    head = [f"**{title}**", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines), ""])


def tables(found: Found) -> Iterator[str]:
    """Yield the tables of the page."""

    def values(rule: str, division: str, metric: str = "accuracy", **varied: Any) -> Any:
        key = attrs.asdict(Cell(rule, division, 0, **varied))
        del key["seed"]
        return found[tuple(key.values())][metric]  # type: ignore[index]

    everything = (*study.RULES, *study.REFERENCES)
    for division in DIVISIONS:
        lines = [
            [rule, *(f"{values(rule, division, m).mean():.3f}" for m in METRICS)]
            + [
                paired(values(rule, division, m), values("conflation", division, m))
                for m in METRICS
            ]
            for rule in everything
        ]
        columns = ["rule", *SHOWN, *(f"{m}, minus conflation's" for m in SHOWN)]
        yield table(f"Rules, `{division}`", columns, lines)
    columns = ["rule", *(f"{w}, `{d}`" for w, d in product(DIVERGENCES, DIVISIONS[1:]))]
    lines = [
        [rule]
        + [
            paired(values(rule, d, weighting=w), values(rule, d))
            for w, d in product(DIVERGENCES, DIVISIONS[1:])
        ]
        for rule in WEIGHTED
    ]
    columns.append("examples, sizes drawn")
    for line in lines:
        given = values(line[0], SIZES, weighting="examples")
        line.append(paired(given, values(line[0], SIZES)))
    yield table("Weightings: accuracy minus that of equal weights", columns, lines)
    lines = [
        [rule, division, f"{values(rule, division, hyper='continual').mean():.3f}"]
        + [
            paired(values(rule, division, m, hyper="continual"), values(rule, division, m))
            for m in METRICS
        ]
        for division in ("iid", "dirichlet:0.5")
        for rule in study.RULES
    ]
    columns = ["rule", "split", "accuracy", *(f"{m}, minus `fixed`" for m in SHOWN)]
    yield table("The prior updated each round (`continual`)", columns, lines)
    lines = []
    for division in study.DIVISIONS:
        for rule in ("dwc", "ws"):
            with_, without = {"pretrain": 0.1, "epochs": LONG}, {"epochs": LONG}
            start = values(rule, division, "pretrained", **with_)
            after, alone = values(rule, division, **with_), values(rule, division, **without)
            means = [f"{one.mean():.3f}" for one in (start, after, alone)]
            lines.append([rule, division, *means, paired(after, alone), paired(after, start)])
    columns = ["rule", "split", "pre-trained model", "after the round", "without pre-training"]
    columns += ["difference", "after the round, minus the pre-trained model"]
    yield table(f"One round of {LONG} local epochs: accuracy", columns, lines)
    lines = []
    for division in DIVISIONS:
        for rule in everything[:-1]:  # a point has no epistemic uncertainty
            each = [values(rule, division, f"{m}{HALF}") for m in MEASURES]
            means = [f"{one.mean():.3f}" for one in (values(rule, division), *each)]
            lines.append([rule, division, *means, paired(each[2], each[0])])
    columns = ["rule", "split", "all", *MEASURES, "epistemic minus entropy"]
    yield table(f"Accuracy on the {HALF} % most certain test samples", columns, lines)


def draw() -> None:
    """Draw the accuracy on retained samples: a column a division, a row a measure; seeds' means."""
    with mpl.rc_context({**study.STYLE, "font.size": 7, "axes.labelsize": 7}):
        figure = Figure(figsize=(10, 5), layout="constrained")
        axes = figure.subplots(len(MEASURES), len(DIVISIONS), sharex=True, sharey="col")
        for (column, division), (line, measure) in product(
            enumerate(DIVISIONS), enumerate(MEASURES)
        ):
            axis = axes[line, column]
            axis.set_title(division if not line else "")
            axis.set_ylabel(f"by {measure}" if not column else "")
            axis.set_xlabel("retained (%)" if line == len(MEASURES) - 1 else "")
            for rule, (colour, dashes) in study.LOOKS.items():
                if rule == "fedavg" and measure == "epistemic":
                    continue
                paths = [Cell(rule, division, seed).folder / "retention.json" for seed in SEEDS]
                curves = [json.loads(p.read_text(encoding="utf-8"))[measure] for p in paths]
                mean = np.mean(curves, 0)
                axis.plot(RETAINED, mean, color=colour, ls=dashes, lw=1.1, label=rule)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
        figure.savefig(RESULTS.with_suffix(".svg"), transparent=True, metadata={"Date": None})


def gather() -> None:
    """Write the figures of what is finished, and the picture; print the tables."""
    rows = [row(cell) for cell in cells() if (cell.folder / SECONDS).exists()]
    with RESULTS.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw()
    print("\n".join(tables(by_key(rows))))


def main() -> None:
    """Run what is missing, then gather."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--report", action="store_true", help="gather only")
    given = parser.parse_args()
    study.ROOT = ROOT
    if not given.report:
        registry = load_registry()
        for cell in cells():
            run(registry, cell)
    gather()


if __name__ == "__main__":
    main()
