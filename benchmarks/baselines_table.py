"""The baselines on Fashion-MNIST small beside the papers' figures. Finished runs are kept.

    python benchmarks/baselines_table.py [--only NAME ...] [--seeds N ...] [--jobs N]

Every row is a `bfl run` of its own, `--jobs` of them at a time. docs/results/baselines.md is
written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "baselines.md"
ROUNDS = 40
PROTOCOL = (
    "--data fashion-mnist --partition labels:5 --clients 10 --train-per-class 50 "
    f"--test-per-class 950 --model mlp --rounds {ROUNDS} --eval-every {ROUNDS} --workers 1"
)
# Percent, Fashion-MNIST small: accuracy by FedSI's and by BPFed's Table 1, ECE by their Tables 2.
PAPERS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    "local": (86.51, None, None, None),
    "fedavg": (81.28, 81.22, None, None),
    "fedavg-adam": (None, None, None, None),
    "fedavg-ft": (88.05, None, None, None),
    "fedprox": (None, None, None, None),
    "scaffold": (None, None, None, None),
    "fedper": (86.62, 89.06, None, None),
    "fedrep": (86.13, 88.76, None, None),
    "fedbabu": (87.70, None, None, None),
    "lg-fedavg": (86.35, 86.79, None, None),
    "per-fedavg": (None, 87.38, None, None),
    "apfl": (None, None, None, None),
    "pfedme": (None, 89.24, None, None),
    "ditto": (None, None, None, None),
    "pfedbayes": (76.74, 87.91, 6.2, 9.2),
    "fedpop": (83.75, 86.63, 10.3, 9.7),
    "sgd-group-sparse": (None, None, None, None),
    "group-snip": (None, None, None, None),
    "centralised": (None, None, None, None),
}
# `fedavg` in two ways: by gradient descent, as published, and by Adam as the personalised methods.
FLAGS = {
    "fedavg": "fedavg --lr 0.1 -o inference.optimiser=sgd",
    "fedavg-adam": "fedavg",
}
ONE_MODEL = {
    "fedavg",
    "fedavg-adam",
    "fedprox",
    "scaffold",
    "sgd-group-sparse",
    "group-snip",
    "centralised",
}


def main() -> None:
    """Run what is missing and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/baselines"))
    parser.add_argument("--only", nargs="*", choices=PAPERS, default=list(PAPERS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    with ThreadPoolExecutor(given.jobs) as pool:
        cells = [
            pool.submit(run, method, seed, given.runs)
            for seed in given.seeds
            for method in sorted(given.only, key=list(PAPERS).index)
        ]
        for cell in as_completed(cells):
            cell.result()
            write(given.runs, given.seeds)


def folder(runs: Path, method: str, seed: int) -> Path:
    """Return where a finished cell is."""
    return runs / f"{method}-{ROUNDS}-{seed}"


def run(method: str, seed: int, runs: Path) -> None:
    """Run one cell unless it is there; one that was interrupted is done anew."""
    done = folder(runs, method, seed)
    if done.exists():
        return
    attempt = 0
    while (out := done.with_name(f"{done.name}.attempt{attempt}")).exists():
        attempt += 1
    bfl = str(Path(sys.executable).with_name("bfl"))
    flags = f"{FLAGS.get(method, method)} {PROTOCOL} --seed {seed} --quiet"
    words = [bfl, "run", *flags.split(), "--out", str(out)]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    out.rename(done)


def figures(runs: Path, method: str, seeds: list[int]) -> dict[str, float]:
    """Return a method's figures, averaged over the seeds; none if one is missing."""
    found = []
    for seed in seeds:
        path = folder(runs, method, seed) / "summary.json"
        if not path.exists():
            return {}
        summary: dict[str, Any] = json.loads(path.read_text())
        final = summary["final"]
        measured = {
            "accuracy": 100 * final["personal.accuracy"]["mean"],
            "std": 100 * final["personal.accuracy"]["std"],
            "ece": 100 * final["personal.ece"]["pooled"],
            "brier": final["personal.brier"]["pooled"],
            "seconds": summary["seconds"]["total"],
        }
        if "global.accuracy" in final:
            measured["global"] = 100 * final["global.accuracy"]["pooled"]
        found.append(measured)
    return {name: mean(one[name] for one in found) for name in found[0]}


def show(value: float | None, places: int = 2) -> str:
    """Show a figure, or that there is none."""
    return "" if value is None else f"{value:.{places}f}"


def write(runs: Path, seeds: list[int]) -> None:
    """Write the results page from the runs that are finished."""
    found = {method: figures(runs, method, seeds) for method in PAPERS}
    names = ("accuracy", "std", "global", "ece", "brier", "seconds")
    rows = []
    for method, of in found.items():
        ours = [show(of.get(name), 4 if name == "brier" else 2) for name in names]
        rows.append(" | ".join([method, *ours, *map(show, PAPERS[method])]))
    which = "seed" if len(seeds) == 1 else "the means over seeds"
    lines = [
        f"# The baselines on Fashion-MNIST small after {ROUNDS} rounds",
        "",
        "```",
        "python benchmarks/baselines_table.py",
        "```",
        "",
        "Each row is the result of",
        f"`bfl run METHOD {PROTOCOL}`.",
        "`fedavg` is trained by gradient descent (`--lr 0.1 -o inference.optimiser=sgd`), and",
        "`fedavg-adam` is the same method with its defaults. All values are those of the last",
        f"round, for {which} {str(seeds)[1:-1]}, in per cent except for Brier's score and seconds:",
        "",
        "* *accuracy* is the mean over clients of the accuracy of the model with which each client",
        "  predicts, and *std* its standard deviation over clients;",
        "* *global accuracy* is the accuracy of the server's model on all test samples;",
        "* *ECE* is pooled, in 10 bins;",
        "* *seconds* are those of one process, on a machine that may have been busy.",
        "",
        "The papers train for 800 rounds; BPFed prints the best of them on test data.",
        "",
        (
            "| method | accuracy | std | global accuracy | ECE | Brier | seconds "
            "| FedSI's accuracy | BPFed's accuracy | FedSI's ECE | BPFed's ECE |"
        ),
        "|---|" + "---|" * 10,
        *(f"| {row} |" for row in rows),
        "",
        *orderings(found),
        "",
    ]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join(lines), encoding="utf-8")


def orderings(found: dict[str, dict[str, float]]) -> list[str]:
    """Say whether the orderings hold that are expected under a split by labels."""
    missing = [method for method, of in found.items() if not of]
    if missing:
        return [f"Not yet measured: {', '.join(missing)}."]
    least = found["fedavg"]["accuracy"]
    below = [m for m in found if m not in ONE_MODEL and found[m]["accuracy"] <= least]
    most = found["centralised"]["global"]
    above = [m for m in found if m != "centralised" and found[m].get("global", 0) >= most]
    return [
        f"Personalised methods not above `fedavg`: {', '.join(below) or 'none'}. (A personal model",
        "distinguishes a client's five classes, `fedavg`'s all ten.)",
        f"Methods not below `centralised` in global accuracy: {', '.join(above) or 'none'}.",
    ]


if __name__ == "__main__":
    main()
