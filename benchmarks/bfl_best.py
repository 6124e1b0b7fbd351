"""The method `bfl-best`: what its parts are worth on validation samples, and its test results.

    python benchmarks/bfl_best.py [--only NAME ...] [--seeds N ...] [--jobs N] [--runs FOLDER]
        [--page]

Every cell is a `bfl run` of its own. Its numbers are added to docs/results/bfl-best.json when it is
finished, and a cell that is there is not run again; docs/results/bfl-best.md is written from that
file (--page: at once, without running anything). NAME is a cell of the search (seed 1000) or a
split of the table, `small` or `large` (seeds 0 to 4).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import attrs

from bflcore.report import statistics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
STORE = RESULTS / "bfl-best.json"
PAGE = RESULTS / "bfl-best.md"
COMMON = "--data fashion-mnist --partition labels:5 --clients 10 --model mlp --workers 1 --ood none"
# As many training samples as in the papers' splits, and far more for validation than these leave.
SPLITS = {
    "small": "--train-per-class 50 --test-per-class 950",
    "large": "--train-per-class 900 --test-per-class 300",
    "small, validation": "--train-per-class 250 --test-per-class 1 --validation-fraction 0.8",
    "large, validation": "--train-per-class 1200 --test-per-class 1 --validation-fraction 0.25",
}
METRICS = ("accuracy", "ece", "brier", "nll")
SEARCHED = (1000,)  # seeds that no results page uses
TABLED = (0, 1, 2, 3, 4)
# Accuracy that must be exceeded, and the largest ECE: those to beat on each split.
BARS = {"small": (0.900, 0.015), "large": (0.9354, 0.02)}


@attrs.frozen
class Cell:
    """One command: on which split, for how many rounds, and what it is in words."""

    split: str
    rounds: int
    flags: str
    what: str = ""

    @property
    def command(self) -> str:
        """The command without seed and folder."""
        return f"bfl run {self.flags} {COMMON} {SPLITS[self.split]} --rounds {self.rounds}"


SHARED = "bpfed --likelihood categorical -o likelihood.label_prior=1 --share all"
# 18 times the samples: a fifth of the epochs, and a rate that falls from round 10.
FEW = "--local-epochs 2 -o inference.lr_decay=0.07 -o inference.lr_decay_after=10"
SMALL, LARGE = "small, validation", "large, validation"
SEARCH = {
    "bpfed": Cell(SMALL, 100, "bpfed", "`bpfed`: heads are personal, no label prior"),
    "shared": Cell(SMALL, 100, SHARED, "everything shared, label prior"),
    "kl-0.1": Cell(
        SMALL,
        100,
        f"{SHARED} --lr 0.002 -o inference.kl_weight=0.1",
        "and lr 0.002, KL weight 0.1",
    ),
    "lr-0.003": Cell(SMALL, 100, f"{SHARED} --lr 0.003", "and lr 0.003"),
    "early": Cell(
        SMALL,
        60,
        f"{SHARED} --lr 0.003 -o inference.lr_decay=0.05 -o inference.lr_decay_after=20",
        "and lr 0.003, falling by 5 % from round 20",
    ),
    "chosen": Cell(SMALL, 75, "bfl-best", "`bfl-best`: lr 0.003, 75 rounds"),
    "body": Cell(SMALL, 75, "bfl-best --share body", "`bfl-best`, heads are personal"),
    "no-prior": Cell(
        SMALL, 75, "bfl-best -o likelihood.label_prior=none", "`bfl-best` without the label prior"
    ),
    "prior-0.1": Cell(
        SMALL, 75, "bfl-best -o likelihood.label_prior=0.1", "`bfl-best`, label prior 0.1"
    ),
    "prior-10": Cell(
        SMALL, 75, "bfl-best -o likelihood.label_prior=10", "`bfl-best`, label prior 10"
    ),
    "kl-1": Cell(SMALL, 75, "bfl-best -o inference.kl_weight=1", "`bfl-best`, KL weight 1"),
    "sigma": Cell(
        SMALL, 75, "bfl-best -o inference.initial_sigma=0.25", "`bfl-best`, initial sigma 0.25"
    ),
    "large-search": Cell(LARGE, 40, f"bfl-best {FEW}", "`bfl-best`, two local epochs, early decay"),
}
TABLE = {
    "small": Cell("small", 75, "bfl-best"),
    "large": Cell("large", 40, f"bfl-best {FEW}"),
}
CELLS = SEARCH | TABLE


def main() -> None:
    """Run what is missing and write the page after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/bfl-best"))
    parser.add_argument("--only", nargs="*", choices=CELLS, default=list(CELLS))
    parser.add_argument("--seeds", type=int, nargs="*", help="[default: those of the page]")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    given = parser.parse_args()
    if given.page:
        write(stored())
        return
    missing = [
        (name, seed)
        for name in given.only
        for seed in given.seeds or (TABLED if name in TABLE else SEARCHED)
        if str(seed) not in stored().get(name, {}).get("seeds", {})
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        for cell in as_completed([pool.submit(run, given.runs, *cell) for cell in missing]):
            keep(*cell.result())


def run(runs: Path, name: str, seed: int) -> tuple[str, int, dict[str, Any]]:
    """Run one cell, or read the finished run; an interrupted one is started again."""
    cell, out = CELLS[name], runs / f"{name}-{seed}"
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        bfl = str(Path(sys.executable).with_name("bfl"))
        words = [bfl, *cell.command.split()[1:], "--seed", str(seed), "--out", str(out), "--quiet"]
        words += ["--eval-every", str(cell.rounds)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return name, seed, measured(out, cell)


def measured(out: Path, cell: Cell) -> dict[str, Any]:
    """Return the numbers of a finished run, and the minutes that it took."""
    summary = json.loads((out / "summary.json").read_text())
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    (record,) = (line for line in lines if line["round"] == cell.rounds)
    prefix = "validation" if "validation" in cell.split else "personal"
    found: dict[str, Any] = {
        metric: record[f"{prefix}.{metric}"]["mean" if metric == "accuracy" else "pooled"]
        for metric in METRICS
    }
    return found | {"minutes": summary["seconds"]["total"] / 60, "bytes up": summary["bytes"]["up"]}


def stored() -> dict[str, Any]:
    """Return what is measured so far: name of the cell -> command and numbers by seed."""
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def keep(name: str, seed: int, numbers: Mapping[str, Any]) -> None:
    """Add a run's numbers to the file, and write the page."""
    content = stored()
    entry = content.setdefault(name, {"seeds": {}})
    entry["command"] = CELLS[name].command
    entry["seeds"] = dict(sorted({**entry["seeds"], str(seed): numbers}.items()))
    content = {known: content[known] for known in CELLS if known in content}
    STORE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write(content)


def write(content: Mapping[str, Any]) -> None:
    """Replace the generated tables of the page, which stand between marks."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, lines in (("search", search(content)), ("table", table(content))):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, _, after = rest.partition(f"<!-- /{mark} -->\n")
        text = "".join([before, f"<!-- {mark} -->\n", *lines, f"<!-- /{mark} -->\n", after])
    PAGE.write_text(text, encoding="utf-8")


def search(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of the search."""
    yield "| cell | split | rounds | seeds | accuracy, % | ECE, % | Brier | NLL |\n"
    yield "|---|---|---|---|---|---|---|---|\n"
    for name, cell in SEARCH.items():
        seeds = content.get(name, {}).get("seeds", {})
        numbers = " | ".join(cells(seeds)) if seeds else "not run |  |  | "
        split = cell.split.partition(",")[0]
        yield f"| {cell.what} | {split} | {cell.rounds} | {len(seeds)} | {numbers} |\n"


def table(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the test results, whether they pass the bars, and the differences from BPFed."""
    yield "| split | rounds | seeds | accuracy, % | ECE, % | Brier | NLL | minutes | MB up |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for name, cell in TABLE.items():
        seeds = content.get(name, {}).get("seeds", {})
        if not seeds:
            yield f"| {name} | {cell.rounds} | none yet |  |  |  |  |  |  |\n"
            continue
        minutes, sent = (
            mean(one[key] for one in seeds.values()) for key in ("minutes", "bytes up")
        )
        numbers = " | ".join(cells(seeds))
        cost = f"{minutes:.1f} | {sent / 1e6:.0f}"
        yield f"| {name} | {cell.rounds} | {', '.join(seeds)} | {numbers} | {cost} |\n"
    yield "\n"
    for name, (accuracy, ece) in BARS.items():
        seeds = content.get(name, {}).get("seeds", {})
        if seeds:
            found = mean(one["accuracy"] for one in seeds.values())
            error = mean(one["ece"] for one in seeds.values())
            exceeded = "met" if found > accuracy else "missed"
            calibrated = "met" if error <= ece else "missed"
            absent = [str(seed) for seed in TABLED if str(seed) not in seeds]
            left = f" (seeds {', '.join(absent)} not run)" if absent else ""
            yield (
                f"* {name}: accuracy {100 * found:.2f} against more than {100 * accuracy:g}: "
                f"{exceeded}; ECE {100 * error:.2f} against at most {100 * ece:g}: "
                f"{calibrated}{left}.\n"
            )
    yield from differences(content)


def differences(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paired differences from `bpfed` on the small split, seed by seed."""
    ours = content.get("small", {}).get("seeds", {})
    theirs = json.loads((RESULTS / "fashion-mnist-small.json").read_text())["rows"]["bpfed"]
    seeds = sorted(ours.keys() & theirs["by seed"].keys())
    if len(seeds) > 1:
        said = []
        for metric, scale, places in (("accuracy", 100, 2), ("ece", 100, 2), ("nll", 1, 4)):
            key = f"{metric} {'mean' if metric == 'accuracy' else 'pooled'}"
            gaps = [scale * (ours[s][metric] - theirs["by seed"][s][key]) for s in seeds]
            error = stdev(gaps) / sqrt(len(gaps))
            p = statistics.paired(gaps).p or 0.0
            verdict = ", not distinguishable" if p >= 0.05 else ""
            said.append(f"{metric} {mean(gaps):+.{places}f} +- {error:.{places}f}{verdict}")
        yield f"* small, minus `bpfed` after 100 rounds, seed by seed: {'; '.join(said)}.\n"


def cells(seeds: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    """Return mean and standard deviation over seeds of every metric."""
    found = []
    for metric, scale, places in zip(METRICS, (100, 100, 1, 1), (2, 2, 4, 4), strict=True):
        values = [scale * one[metric] for one in seeds.values()]
        spread = f" +- {stdev(values):.{places}f}" if len(values) > 1 else ""
        found.append(f"{mean(values):.{places}f}{spread}")
    return found


if __name__ == "__main__":
    main()
