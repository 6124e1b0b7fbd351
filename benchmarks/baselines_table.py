"""The baselines on Fashion-MNIST small beside the papers' figures. Finished runs are kept.

    python benchmarks/baselines_table.py [--runs FOLDER] [--only NAME ...] [--rounds N]

Every cell is a `bfl run` of its own; docs/results/baselines.md is written after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "baselines.md"
PROTOCOL = (
    "--data fashion-mnist --partition labels:5 --clients 10 --train-per-class 50 "
    "--test-per-class 950 --model mlp --seed 0"
)
# Accuracy printed by FedSI's and by BPFed's Table 1, Fashion-MNIST small; ECE by BPFed's Table 2.
PAPERS: dict[str, tuple[float | None, float | None, float | None]] = {
    "local": (86.51, None, None),
    "fedavg": (81.28, 81.22, None),
    "fedavg-ft": (88.05, None, None),
    "fedprox": (None, None, None),
    "scaffold": (None, None, None),
    "fedper": (86.62, 89.06, None),
    "fedrep": (86.13, 88.76, None),
    "fedbabu": (87.70, None, None),
    "lg-fedavg": (86.35, 86.79, None),
    "per-fedavg": (None, 87.38, None),
    "apfl": (None, None, None),
    "pfedme": (None, 89.24, None),
    "ditto": (None, None, None),
    "pfedbayes": (76.74, 87.91, 9.2),
    "fedpop": (83.75, 86.63, 9.7),
    "sgd-group-sparse": (None, None, None),
    "group-snip": (None, None, None),
    "centralised": (None, None, None),
}


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/baselines"))
    parser.add_argument("--only", nargs="*", choices=PAPERS, default=list(PAPERS))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for method in PAPERS:
        folder = arguments.runs / f"{method}-{arguments.rounds}"
        if method in arguments.only and not (folder / "summary.json").exists():
            run(method, arguments.rounds, folder)
            write(arguments.runs, arguments.rounds)
    write(arguments.runs, arguments.rounds)


def run(method: str, rounds: int, folder: Path) -> None:
    """Run one cell from the start; a run that was interrupted is done anew."""
    command = f"run {method} {PROTOCOL} --rounds {rounds} --eval-every {rounds} --quiet"
    attempt = 0
    while (out := folder.with_name(f"{folder.name}.attempt{attempt}")).exists():
        attempt += 1
    bfl = str(Path(sys.executable).with_name("bfl"))
    words = [bfl, *command.split(), "--workers", "1", "--out", str(out)]
    subprocess.run(words, check=True)
    out.rename(folder)


def figure(value: float | None) -> str:
    """Show a printed figure, or that there is none."""
    return "" if value is None else f"{value:.2f}"


def row(method: str, folder: Path) -> str:
    """Return a line of the table."""
    printed = " | ".join(figure(value) for value in PAPERS[method])
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return f"| {method} | not yet measured | | | {printed} |"
    final = summary["final"]
    accuracy, ece = final["personal.accuracy"]["mean"], final["personal.ece"]["pooled"]
    overall = final.get("global.accuracy", {}).get("pooled")
    everyone = "" if overall is None else f"{100 * overall:.2f}"
    return f"| {method} | {100 * accuracy:.2f} | {everyone} | {100 * ece:.2f} | {printed} |"


def write(runs: Path, rounds: int) -> None:
    """Write the table of what is finished."""
    lines = [
        f"# The baselines on Fashion-MNIST small after {rounds} rounds",
        "",
        f"`python benchmarks/baselines_table.py --rounds {rounds}`; every cell is",
        f"`bfl run METHOD {PROTOCOL} --rounds {rounds}`.",
        "Percent; accuracy: mean over clients, last round; global: the server's model on all test",
        "samples; ECE pooled, 10 bins. The papers train 800 rounds; BPFed prints the best of them.",
        "",
        "| method | accuracy | global | ECE | FedSI's | BPFed's | BPFed's ECE |",
        "|---|---|---|---|---|---|---|",
        *(row(method, runs / f"{method}-{rounds}") for method in PAPERS),
        "",
    ]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
