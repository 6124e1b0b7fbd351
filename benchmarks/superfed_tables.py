"""SuPerFed's tables: the pathological split, and label noise. Runs that are finished are kept.

    python benchmarks/superfed_tables.py [--runs FOLDER] [--only NAME]

Every run is a `bfl run` of its own; the tables are written to docs/results/superfed.md after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "superfed.md"
SCHEDULE = (
    "--model two-nn --cohort 5 --local-epochs 10 --batch-size 10 --lr 0.01 --bins 15 --workers 1 "
    "-o inference.optimiser=sgd -o inference.momentum=0.9 -o inference.weight_decay=0.0001 "
    "-o inference.lr_decay=0.01"
)
SPLITS = {
    "mnist5k": "--data mnist5k --partition shards:2 --clients 50 --rounds 100 --eval-every 100",
    "fashion-mnist": (
        "--data fashion-mnist --partition shards:2 --clients 50 --train-per-class 20 "
        "--test-per-class 100 --rounds 100 --eval-every 100"
    ),
}
METHODS = {
    "fedavg": "fedavg",
    "fedprox": "fedavg --hyper continual -o inference.anchor=0.01",
    "local": "fedavg --share none",
    "superfed-mm": "superfed-mm",
    "superfed-lm": "superfed-lm",
}
# Fifty rounds are past FedAvg's best accuracy; its training loss still falls: it learns the noise.
NOISE = "--data mnist5k --partition dirichlet:100 --clients 20 --rounds 50 --eval-every 10"
CELLS = ("pair:0.1", "pair:0.4", "symmetric:0.2", "symmetric:0.6")
NOISY = {
    "fedavg": "fedavg",
    "superfed-mm": "superfed-mm",
    "superfed-mm, ensemble": "superfed-mm -o inference.lambda_selection=ensemble",
    "superfed-lm": "superfed-lm",
}


def commands() -> dict[str, str]:
    """Return every run's arguments by name, the most telling first."""
    split = {
        f"{data}/{name}": f"{method} {flags} {SCHEDULE}"
        for data, flags in SPLITS.items()
        for name, method in METHODS.items()
    }
    noise = {
        f"{cell}/{name}": f"{method} {NOISE} --label-noise {cell} {SCHEDULE}"
        for cell in CELLS
        for name, method in NOISY.items()
    }
    return split | noise


def folder_of(root: Path, name: str) -> Path:
    """Return the run directory of a name."""
    return root / "".join(c if c.isalnum() or c == "-" else "-" for c in name)


def finished(root: Path, name: str) -> dict[str, Any] | None:
    """Return what a run found, or None."""
    folder = folder_of(root, name)
    if not (folder / "summary.json").is_file():
        return None
    return {
        **json.loads((folder / "summary.json").read_text())["final"],
        "curves": json.loads((folder / "evaluation.json").read_text()).get("curves", {}),
    }


def split_table(root: Path, data: str) -> list[str]:
    """Return the rows of a pathological split."""
    lines = ["| | accuracy | std over clients | ECE (pooled) | oracle | curve, lowest to highest |"]
    lines.append("|---|---|---|---|---|---|")
    for name in METHODS:
        if found := finished(root, f"{data}/{name}"):
            own, ece = found["personal.accuracy"], found["personal.ece"]["pooled"]
            oracle, curve = "", ""
            if "lambda" in found["curves"]:
                points = found["curves"]["lambda"]
                best = [max(client["accuracy"]) for client in points["clients"]]
                oracle = f"{sum(best) / len(best):.4f}"
                means = points["mean"]["accuracy"]
                curve = f"{min(means):.4f} to {max(means):.4f}"
            lines.append(
                f"| {name} | {own['mean']:.4f} | {own['std']:.4f} | {ece:.4f} "
                f"| {oracle} | {curve} |"
            )
    return lines


def noise_table(root: Path) -> list[str]:
    """Return one row a method, one column a cell: ECE, MCE, accuracy."""
    lines = [
        "| ECE / MCE / accuracy | " + " | ".join(CELLS) + " |",
        "|---" * (len(CELLS) + 1) + "|",
    ]
    for name in NOISY:
        cells = []
        for cell in CELLS:
            found = finished(root, f"{cell}/{name}")
            keys = ("personal.ece", "personal.mce", "personal.accuracy")
            cells.append(" / ".join(f"{found[key]['pooled']:.4f}" for key in keys) if found else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def page(root: Path) -> str:
    """Return the page of results so far."""
    every = commands()
    lines = ["# SuPerFed: results", "", "Written by `benchmarks/superfed_tables.py`; seed 0."]
    for data in SPLITS:
        if not any(finished(root, f"{data}/{name}") for name in METHODS):
            continue
        lines += ["", f"## Pathological split, {data}", "", *split_table(root, data)]
    lines += [
        "",
        "*oracle*: each client's lambda with the best accuracy on its test samples, a bound",
    ]
    lines += ["and no result. *curve*: accuracy over the eleven lambdas, mean over clients."]
    lines += [
        "",
        "## Label noise",
        "",
        *noise_table(root),
        "",
        "Figures pool all clients' samples.",
        "",
        "## Along the segment, mnist5k",
        "",
        "![accuracy along lambda](superfed-lambda.svg)",
    ]
    lines += ["", "## Commands", "", "```"]
    lines += [f"bfl run {text}" for name, text in every.items() if finished(root, name)]
    return "\n".join([*lines, "```", ""])


def drawing(root: Path) -> str:
    """Return an SVG: mean accuracy along the segment, mnist5k, from 0.8 to 1."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 440 240" font-size="11">',
        '<path d="M40 10V210H420" fill="none" stroke="gray"/>',
        '<text x="4" y="16">1.0</text><text x="4" y="213">0.8</text>',
        '<text x="40" y="228">lambda = 0</text><text x="385" y="228">1</text>',
    ]
    for row, (name, colour) in enumerate((("superfed-mm", "#0072b2"), ("superfed-lm", "#d55e00"))):
        found = finished(root, f"mnist5k/{name}")
        if found is None:
            continue
        curve = found["curves"]["lambda"]["mean"]["accuracy"]
        points = " ".join(f"{40 + 35 * i},{10 + 1000 * (1 - y):.1f}" for i, y in enumerate(curve))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        lines.append(f'<text x="300" y="{150 + 16 * row}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Run what is not finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs/superfed-tables"))
    parser.add_argument("--only", default="", help="runs whose name contains this")
    given = parser.parse_args()
    for name, text in commands().items():
        if given.only in name and finished(given.runs, name) is None:
            out = folder_of(given.runs, name)
            words = ["run", *text.split(), "--out", str(out), "--quiet"]
            subprocess.run([sys.executable, "-m", "bflcore.cli", *words], check=True)
            print(name, finished(given.runs, name)["personal.accuracy"], flush=True)
        RESULTS.write_text(page(given.runs))
        RESULTS.with_name("superfed-lambda.svg").write_text(drawing(given.runs))


if __name__ == "__main__":
    main()
