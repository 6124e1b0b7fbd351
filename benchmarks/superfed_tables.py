"""SuPerFed's tables: the pathological split, and label noise. Runs that are finished are kept.

    python benchmarks/superfed_tables.py [--runs FOLDER] [--only NAME]

Every run is a `bfl run` of its own; the tables are written to docs/results/superfed.md after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
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
    "superfed-mm, ensemble": "superfed-mm -o inference.lambda_selection=ensemble",
    "superfed-lm": "superfed-lm",
}
# Fifty rounds are past FedAvg's best accuracy; its training loss still falls: it learns the noise.
NOISE = "--data mnist5k --partition dirichlet:100 --clients 20 --rounds 50 --eval-every 50"
CELLS = ("pair:0.1", "pair:0.4", "symmetric:0.2", "symmetric:0.6")
NOISY = {
    "fedavg": "fedavg",
    "superfed-mm": "superfed-mm",
    "superfed-mm, ensemble": "superfed-mm -o inference.lambda_selection=ensemble",
    "superfed-lm": "superfed-lm",
}
SEEDS = {"mnist5k": (0, 1, 2), "fashion-mnist": (0, 1), "noise": (0,)}


def commands() -> dict[str, str]:
    """Return every run's arguments by name, without the seed."""
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


def seeds(name: str) -> tuple[int, ...]:
    """Return the seeds of a run."""
    return SEEDS.get(name.partition("/")[0], SEEDS["noise"])


def folder_of(root: Path, name: str, seed: int) -> Path:
    """Return the run directory of a name and a seed."""
    return root / "".join(c if c.isalnum() or c == "-" else "-" for c in f"{name}-{seed}")


def finished(root: Path, name: str) -> dict[int, dict[str, Any]]:
    """Return what a name's runs found, by seed."""
    found = {}
    for seed in seeds(name):
        folder = folder_of(root, name, seed)
        if (folder / "summary.json").is_file():
            curves = json.loads((folder / "evaluation.json").read_text()).get("curves", {})
            figures = json.loads((folder / "summary.json").read_text())["final"]
            found[seed] = {**figures, "lambda": curves.get("lambda")}
    return found


def over(values: Iterable[float], digits: int = 4) -> str:
    """Return the mean over seeds, and the standard deviation where there are several."""
    given = list(values)
    spread = f" ± {statistics.stdev(given):.{digits}f}" if len(given) > 1 else ""
    return f"{statistics.mean(given):.{digits}f}{spread}"


def split_table(root: Path, data: str) -> list[str]:
    """Return the rows of a pathological split."""
    lines = [
        (
            "| method | seeds | accuracy | std over clients | ECE (pooled) | oracle accuracy "
            "| accuracy at lambda 0 and 1 |"
        ),
        "|---" * 7 + "|",
    ]
    for name in METHODS:
        if by_seed := finished(root, f"{data}/{name}"):
            found = list(by_seed.values())
            own = [one["personal.accuracy"] for one in found]
            ece = over(one["personal.ece"]["pooled"] for one in found)
            oracle, curve = "", ""
            if found[0]["lambda"]:
                best = [
                    statistics.mean(max(client["accuracy"]) for client in one["lambda"]["clients"])
                    for one in found
                ]
                oracle = over(best)
                means = [one["lambda"]["mean"]["accuracy"] for one in found]
                curve = " to ".join(over(mean[at] for mean in means) for at in (0, -1))
            lines.append(
                f"| {name} | {', '.join(map(str, by_seed))} | {over(one['mean'] for one in own)} "
                f"| {over(one['std'] for one in own)} | {ece} | {oracle} | {curve} |"
            )
    return lines


def noise_table(root: Path) -> list[str]:
    """Return one row a method, one column a cell: ECE, accuracy."""
    lines = ["| method | " + " | ".join(CELLS) + " |", "|---" * (len(CELLS) + 1) + "|"]
    for name in NOISY:
        cells = []
        for cell in CELLS:
            found = finished(root, f"{cell}/{name}").values()
            keys = ("personal.ece", "personal.accuracy")
            texts = (over(one[key]["pooled"] for one in found) for key in keys)
            cells.append(" / ".join(texts) if found else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def page(root: Path) -> str:
    """Return the page of results so far."""
    lines = [
        "# SuPerFed: results",
        "",
        "```",
        "python benchmarks/superfed_tables.py",
        "```",
        "",
        "This script trains the models and writes this page. The individual runs are listed under",
        "[Commands](#commands).",
    ]
    for data in SPLITS:
        if any(finished(root, f"{data}/{name}") for name in METHODS):
            lines += ["", f"## Pathological split, {data}", "", *split_table(root, data)]
    lines += [
        "",
        "Values are means over seeds ± standard deviations over seeds. *Std over clients* is the",
        "mean over seeds of the standard deviation over clients. ECE has 15 bins. *Oracle",
        "accuracy* chooses, for each client, the lambda with the best accuracy on its test",
        "samples: an upper bound, not a result to report.",
        "",
        "## Label noise",
        "",
        "Each cell shows ECE / accuracy, pooled over all clients' samples:",
        "",
        *noise_table(root),
        "",
        "## Along the segment, mnist5k, seed 0",
        "",
        "![accuracy along lambda](superfed-lambda.svg)",
        "",
        "## Commands",
        "",
        "```",
    ]
    for name, text in commands().items():
        lines += [f"bfl run {text} --seed {seed}" for seed in finished(root, name)]
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
        if not found:
            continue
        curve = min(found.items())[1]["lambda"]["mean"]["accuracy"]
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
    wanted = [(name, seed) for name in commands() if given.only in name for seed in seeds(name)]
    for name, seed in sorted(wanted, key=lambda one: seeds(one[0]).index(one[1])):
        out = folder_of(given.runs, name, seed)
        if not (out / "summary.json").is_file():
            words = ["run", *commands()[name].split(), "--seed", str(seed), "--out", str(out)]
            subprocess.run([sys.executable, "-m", "bflcore.cli", *words, "--quiet"], check=True)
            print(name, seed, finished(given.runs, name)[seed]["personal.accuracy"], flush=True)
        RESULTS.write_text(page(given.runs))
        RESULTS.with_name("superfed-lambda.svg").write_text(drawing(given.runs))


if __name__ == "__main__":
    main()
