"""Every personalised method and baseline on Fashion-MNIST small, five seeds, beside the papers.

    python benchmarks/fashion_mnist_small.py [--only NAME ...] [--seeds N ...] [--jobs N]
        [--rounds N] [--bpfed-rounds N] [--estimate | --pages]

Every cell is a `bfl run` of its own, evaluated after its last round only; finished runs are kept.
The pages docs/results/fashion-mnist-small.json and .md are written after each cell (--pages: at
once). --estimate times two rounds of each method, prints how long all would take, and stops.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zlib
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
DATA = (
    "--data fashion-mnist --partition labels:5 --clients 10 --train-per-class 50 "
    "--test-per-class 950 --model mlp --workers 1"
)
METRICS = ("accuracy", "ece", "mce", "brier", "nll")
TIMED = 2  # rounds


@attrs.frozen
class Row:
    """A method with its flags, and what two papers print for it, in per cent (Brier: 0 to 2).

    `fedsi` and `bpfed` are the accuracies of Table 1 of either paper, Fashion-MNIST small; `tables`
    are ECE, MCE and Brier's score of FedSI's Table 2 and the ECE of BPFed's.
    """

    flags: str
    fedsi: float | None = None
    bpfed: float | None = None
    tables: tuple[float | None, float | None, float | None, float | None] = (None,) * 4


ROWS = {
    "bpfed": Row("bpfed", 86.54, 89.68, (9.3, 29.9, 0.209, 8.9)),
    "fedsi": Row("fedsi", 88.41, None, (5.7, 23.2, 0.182, None)),
    "fedsi-fac": Row("fedsi-fac", 86.55, None, (6.8, 28.3, 0.281, None)),
    "local": Row("local", 86.51),
    "fedavg": Row("fedavg", 81.28, 81.22),
    "fedavg-adam": Row("fedavg"),
    "fedavg-ft": Row("fedavg-ft", 88.05),
    "fedprox": Row("fedprox"),
    "scaffold": Row("scaffold"),
    "fedper": Row("fedper", 86.62, 89.06),
    "fedrep": Row("fedrep", 86.13, 88.76),
    "fedbabu": Row("fedbabu", 87.70),
    "lg-fedavg": Row("lg-fedavg", 86.35, 86.79),
    "per-fedavg": Row("per-fedavg", None, 87.38),
    "apfl": Row("apfl"),
    "pfedme": Row("pfedme", None, 89.24),
    "ditto": Row("ditto"),
    "pfedbayes": Row("pfedbayes", 76.74, 87.91, (6.2, 28.7, 0.190, 9.2)),
    "fedpop": Row("fedpop", 83.75, 86.63, (10.3, 28.0, 0.237, 9.7)),
    "sgd-group-sparse": Row("sgd-group-sparse"),
    "group-snip": Row("group-snip"),
    "centralised": Row("centralised"),
}
OURS = ("bpfed", "fedsi")  # compared with every other row
INTRODUCTION = """\
# Fashion-MNIST small: every method

```
python benchmarks/fashion_mnist_small.py
```

Each cell is `bfl run METHOD {data} --rounds N --eval-every N --seed S`
with the options [chosen on validation samples](defaults.md) of other seeds where that page names
the method, and its defaults otherwise (`fedavg-adam`: those of `fedavg`). All commands, and the
numbers of every seed, are in `fashion-mnist-small.json`.

All values are those of the last round: mean +- standard deviation over seeds {seeds}.
Accuracy is the mean over clients; the other metrics are pooled over samples, with 10 bins. The
papers train for 800 rounds, and BPFed's prints the best of them on test data. Here, `bpfed` trains
for {bpfed} rounds and all others for {rounds}, so differences from `bpfed` include those rounds.
Machine: {machine}; torch {torch}.
"""
DIFFERENCES = """\
## `{ours}` minus the others, seed by seed

Mean of the paired differences +- its standard error. Where the 95 % interval (Student's t over
seeds) contains zero, the two are
[not distinguishable](../concepts/evaluation.md#not-distinguishable) (n.d.). Higher is better for
accuracy, lower for the others. Seeds share one pool of 70,000 images, so the differences are less
independent than their standard errors assume.
"""


def main() -> None:
    """Run what is missing and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/fashion-mnist-small"))
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="of the baselines and fedsi")
    parser.add_argument("--bpfed-rounds", type=int, default=100)
    parser.add_argument("--estimate", action="store_true", help="time two rounds of each and stop")
    parser.add_argument("--pages", action="store_true", help="write the pages of finished runs")
    given = parser.parse_args()
    rounds = dict.fromkeys(ROWS, given.rounds)
    rounds |= {"bpfed": given.bpfed_rounds}
    table = Table(given.runs, rounds, given.seeds, chosen_flags())
    if given.pages:
        table.write()
        return
    cells = [
        (name, seed)
        for seed in given.seeds
        for name in sorted(given.only, key=list(ROWS).index)
        if not table.folder(name, seed).exists()
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        if given.estimate:
            table.estimate(cells, given.jobs, pool)
            return
        for cell in as_completed([pool.submit(table.run, *cell) for cell in cells]):
            cell.result()
            table.write()


def chosen_flags() -> dict[str, str]:
    """Return the flags that choose_defaults.py chose on validation samples, by method."""
    decisions = json.loads((RESULTS / "defaults.json").read_text())["decisions"]
    chosen: dict[str, str] = {}
    for decision in decisions:
        before = chosen.get(decision["method"], "")
        chosen[decision["method"]] = f"{before} {decision['chosen']}".strip()
    return chosen


@attrs.frozen
class Table:
    """Where the runs are, the rounds of each row, the seeds, and the flags chosen for a method."""

    runs: Path
    rounds: Mapping[str, int]
    seeds: Sequence[int]
    chosen: Mapping[str, str]

    def folder(self, name: str, seed: int, rounds: int | None = None) -> Path:
        """Return where a finished cell is."""
        digest = zlib.crc32(self.command(name, rounds).encode())
        return self.runs / f"{name}-{rounds or self.rounds[name]}-{seed}-{digest:08x}"

    def command(self, name: str, rounds: int | None = None) -> str:
        """Return a row's command, without seed and folder."""
        number = rounds or self.rounds[name]
        flags = f"{ROWS[name].flags} {self.chosen.get(name, '')}".strip()
        return f"bfl run {flags} {DATA} --rounds {number} --eval-every {number}"

    def run(self, name: str, seed: int, rounds: int | None = None) -> dict[str, Any]:
        """Run one cell unless it is there and return its summary; an interrupted one is redone."""
        done = self.folder(name, seed, rounds)
        if not done.exists():
            attempts = (done.with_name(f"{done.name}.attempt{i}") for i in range(1000))
            out = next(path for path in attempts if not path.exists())
            bfl = str(Path(sys.executable).with_name("bfl"))
            number = rounds or self.rounds[name]
            rest = f"--checkpoint-every {number} --seed {seed} --quiet --out {out}"
            words = [bfl, *f"{self.command(name, rounds)} {rest}".split()[1:]]
            subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            out.rename(done)
        summary: dict[str, Any] = json.loads((done / "summary.json").read_text())
        return summary

    def estimate(
        self, cells: Sequence[tuple[str, int]], jobs: int, pool: ThreadPoolExecutor
    ) -> None:
        """Time each method that is missing, and print how long its cells and all will take."""
        names = list(dict.fromkeys(name for name, _ in cells))
        timed = pool.map(lambda name: self.run(name, self.seeds[0], TIMED)["seconds"], names)
        total = 0.0
        for name, seconds in zip(names, timed, strict=True):
            training = (seconds["clients"] + seconds["server"]) / TIMED * self.rounds[name]
            one = training + seconds["evaluation"]
            count = sum(cell == name for cell, _ in cells)
            total += count * one
            print(f"{name}: {count} runs of {one:.0f} s", flush=True)
        print(f"all: {total / jobs / 60:.0f} minutes, {jobs} at a time", flush=True)

    def measured(self, name: str) -> dict[int, dict[str, float]]:
        """Return a row's numbers by seed, of the seeds that are finished."""
        found = {}
        for seed in self.seeds:
            if not (self.folder(name, seed) / "summary.json").exists():
                continue
            summary = self.run(name, seed)
            final = summary["final"]
            one = {
                f"{metric} {statistic}": final[f"personal.{metric}"][statistic]
                for metric in METRICS
                for statistic in ("mean", "pooled")
            }
            one["accuracy std over clients"] = final["personal.accuracy"]["std"]
            if "global.accuracy" in final:
                one["global accuracy"] = final["global.accuracy"]["pooled"]
            one |= {"seconds": summary["seconds"]["total"]}
            one |= {f"bytes {way}": summary["bytes"][way] for way in ("up", "down")}
            found[seed] = one
        return found

    def versions(self) -> dict[str, Any]:
        """Return the versions of the first finished run."""
        for name in ROWS:
            for seed in self.seeds:
                path = self.folder(name, seed) / "environment.json"
                if path.exists():
                    found = json.loads(path.read_text())
                    return {key: found[key] for key in ("python", "torch", "distributions")}
        return {}

    def write(self) -> None:
        """Write both pages from the finished runs."""
        rows = {name: of for name in ROWS if (of := self.measured(name))}
        content = {
            "seeds": list(self.seeds),
            "machine": f"{os.cpu_count()} CPU cores, one per run, also busy with other work",
            "versions": self.versions(),
            "rows": {
                name: {"command": self.command(name), "by seed": of} for name, of in rows.items()
            },
        }
        text = json.dumps(content, indent=1) + "\n"
        (RESULTS / "fashion-mnist-small.json").write_text(text, encoding="utf-8")
        lines = [*self.introduction(content), *accuracies(rows), *calibration(rows)]
        for ours in OURS:
            lines += differences(ours, rows)
        page = "\n".join([*lines, ""])
        (RESULTS / "fashion-mnist-small.md").write_text(page, encoding="utf-8")

    def introduction(self, content: Mapping[str, Any]) -> Iterator[str]:
        """Yield what was run, and what the columns mean."""
        yield INTRODUCTION.format(
            data=DATA,
            seeds=str(list(self.seeds))[1:-1],
            machine=content["machine"],
            torch=content["versions"].get("torch", ""),
            bpfed=self.rounds["bpfed"],
            rounds=self.rounds["fedavg"],
        )
        missing = [name for name in ROWS if name not in content["rows"]]
        if missing:
            yield f"Not yet measured: {', '.join(missing)}."
            yield ""


def accuracies(rows: Mapping[str, dict[int, dict[str, float]]]) -> Iterator[str]:
    """Yield the table of accuracies and costs."""
    head = ("accuracy, %", "FedSI's", "BPFed's", "global accuracy, %", "minutes", "MB up")
    yield f"| method | seeds | {' | '.join(head)} |"
    yield "|---|" + "---|" * 7
    for name, of in rows.items():
        cells = [
            name,
            str(len(of)),
            spread(of, "accuracy mean", 100, 2),
            number(ROWS[name].fedsi),
            number(ROWS[name].bpfed),
            spread(of, "global accuracy", 100, 2),
            f"{mean(one['seconds'] for one in of.values()) / 60:.1f}",
            f"{mean(one['bytes up'] for one in of.values()) / 1e6:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def calibration(rows: Mapping[str, dict[int, dict[str, float]]]) -> Iterator[str]:
    """Yield the table of calibration."""
    yield "## Calibration"
    yield ""
    head = ("ECE, %", "FedSI's", "BPFed's", "MCE, %", "FedSI's", "Brier", "FedSI's", "NLL")
    yield f"| method | {' | '.join(head)} | ECE per client, % |"
    yield "|---|" + "---|" * 9
    for name, of in rows.items():
        ece, mce, brier, other = ROWS[name].tables
        cells = [
            *(name, spread(of, "ece pooled", 100, 2), number(ece), number(other)),
            *(spread(of, "mce pooled", 100, 1), number(mce)),
            *(spread(of, "brier pooled", 1, 4), number(brier)),
            *(spread(of, "nll pooled", 1, 4), spread(of, "ece mean", 100, 2)),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def differences(ours: str, rows: Mapping[str, dict[int, dict[str, float]]]) -> Iterator[str]:
    """Yield the table of paired differences between a method and every other row."""
    yield DIFFERENCES.format(ours=ours)
    yield "| method | seeds | accuracy, points | NLL | ECE, points | Brier |"
    yield "|---|" + "---|" * 5
    for name, of in rows.items():
        seeds = sorted(of.keys() & rows.get(ours, {}).keys())
        if name == ours or len(seeds) < 2:
            continue
        pairs = [(rows[ours][seed], of[seed]) for seed in seeds]
        cells = [
            *(name, str(len(seeds))),
            *(paired(pairs, "accuracy mean", 100, 2), paired(pairs, "nll pooled", 1, 4)),
            *(paired(pairs, "ece pooled", 100, 2), paired(pairs, "brier pooled", 1, 4)),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def paired(pairs: Sequence[tuple[Any, Any]], key: str, scale: float, places: int) -> str:
    """Return mean and standard error of the differences, and whether they are n.d."""
    gaps = [scale * (one[key] - other[key]) for one, other in pairs]
    error = stdev(gaps) / sqrt(len(gaps))
    p = statistics.paired(gaps).p or 0.0
    verdict = " (n.d.)" if p >= 0.05 else ""
    return f"{mean(gaps):+.{places}f} +- {error:.{places}f}{verdict}"


def spread(of: Mapping[int, dict[str, float]], key: str, scale: float, places: int) -> str:
    """Return mean and standard deviation over seeds; nothing if the row has no such metric."""
    values = [scale * one[key] for one in of.values() if key in one]
    if not values:
        return ""
    deviation = f" +- {stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{mean(values):.{places}f}{deviation}"


def number(value: float | None) -> str:
    """Return a paper's number, or nothing."""
    return "" if value is None else f"{value:g}"


if __name__ == "__main__":
    main()
