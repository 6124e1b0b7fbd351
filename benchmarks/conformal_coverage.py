"""Do conformal sets cover what they promise, and are federated ones smaller than local ones?

    python benchmarks/conformal_coverage.py [--runs FOLDER] [--seeds N ...] [--rounds N] [--pages]

Trains each method on each data set with 50 and with 20 calibration samples per client, and measures
the sets of all scopes on test samples: one run gives them all, because thresholds are computed from
stored histograms. Finished runs are kept in FOLDER, so that an interrupted study continues. Writes
docs/results/conformal.json and .md (--pages: from the runs that are there).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import attrs
import numpy as np
from scipy import stats

import bflcore
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import read, resolve
from bflcore.problem.calibration.conformal import Conformal
from bflcore.registry.loading import load_registry

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COVERAGE = 0.9
BAND = 0.99
METHODS = ("fedavg", "fedper")
# Data set -> its flags, and the fraction of training samples that leaves so many for calibration.
DATA: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "mnist5k": ({"data": "mnist5k"}, {50: 0.125, 20: 0.05}),
    "fashion-mnist": (
        {
            "data": "fashion-mnist",
            "partition": "labels:5",
            "train_per_class": 50,
            "test_per_class": 950,
        },
        {50: 0.2, 20: 0.08},
    ),
}
KINDS = {
    "client": {"scope": "client"},
    "shrunk": {"scope": "shrunk"},
    "federated": {"scope": "federated"},
    "client, confidence .95": {"scope": "client", "confidence": 0.95},
    "federated, confidence .95": {"scope": "federated", "confidence": 0.95},
}


@attrs.frozen
class Cell:
    """One run."""

    data: str
    method: str
    samples: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder and of its figures."""
        return f"{self.data}-{self.method}-{self.samples}-{self.seed}"


def main() -> None:
    """Run what is missing and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/conformal"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pages", action="store_true")
    given = parser.parse_args()
    cells = [
        Cell(data, method, samples, seed)
        for seed in given.seeds
        for data, (_, fractions) in DATA.items()
        for method in METHODS
        for samples in fractions
    ]
    given.runs.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in cells:
        file = given.runs / f"{cell.name}.json"
        if not file.exists():
            if given.pages:
                continue
            file.write_text(json.dumps(measure(cell, given.runs, given.rounds)))
            print(file.stem, flush=True)
        rows += json.loads(file.read_text())
    write(rows, given.seeds, given.rounds)


def measure(cell: Cell, runs: Path, rounds: int) -> list[dict[str, Any]]:
    """Train one run if it is missing; return its figures, a row per client and kind of set."""
    flags, fractions = DATA[cell.data]
    folder = runs / cell.name
    if not (folder / "summary.json").exists():
        bflcore.run(
            cell.method,
            out=folder,
            rounds=rounds,
            seed=cell.seed,
            eval_every=rounds,
            workers=1,
            calibration_fraction=fractions[cell.samples],
            options={"calibrator.conformal.scope": "client"},
            **flags,
        )
    run = bflcore.load(folder)
    experiment = resolve(load_registry(), cell.method, read(folder / "experiment.toml"), {})
    problem = prepare(experiment).problem
    rows = []
    for client in problem.clients:
        x, y = problem.test.of(client)
        model = run.client(client)
        made = model.predict(x).made
        p = made.draws[0].double().mean(0)
        common = {**attrs.asdict(cell), "client": client, "tests": len(y)}
        common["accuracy"] = float((p.argmax(1) == y).double().mean())
        own, total = (
            {k.removeprefix("conformal."): t for k, t in sums.items() if k.startswith("conformal.")}
            for sums in (model.calibration, model.broadcast.calibration)
        )
        for kind, options in KINDS.items():
            for empty in (True, False):
                one = Conformal(**options, empty=empty)
                sums = one.chosen(own, total)
                inside = one.region(sums, made, COVERAGE)
                row = {
                    "kind": kind,
                    "raw": empty,
                    "calibration": float(sums["examples"]),
                    "covered": int(inside.gather(1, y[:, None]).sum()),
                    "size": float(inside.sum(1).double().mean()),
                }
                rows.append(common | row)
    return rows


def bands(row: dict[str, Any]) -> dict[str, bool]:
    """Return within which bands the number of covered test samples lies.

    Weighted samples (`shrunk`) have no exact distribution.
    """
    tests, covered = row["tests"], row["covered"]
    low, high = stats.binom.interval(BAND, tests, COVERAGE)
    found = {
        "binomial": bool(low <= covered <= high),
        "not below": bool(covered >= stats.binom.ppf(1 - BAND, tests, COVERAGE)),
    }
    if row["kind"] == "shrunk":
        return found
    n, confidence = round(row["calibration"]), KINDS[row["kind"]].get("confidence", 0)
    k = int(np.ceil(COVERAGE * (n + 1) - 1e-9))
    while stats.beta.sf(COVERAGE, k, n + 1 - k) < confidence:
        k += 1
    exact = stats.betabinom(tests, k, n + 1 - k)
    return found | {
        "beta-binomial": bool(exact.ppf((1 - BAND) / 2) <= covered <= exact.ppf((1 + BAND) / 2)),
        "beta-binomial, not below": bool(covered >= exact.ppf(1 - BAND)),
    }


Rows = list[dict[str, Any]]
OTHERS = ("shrunk", "federated")
BANDS = ("binomial", "not below", "beta-binomial", "beta-binomial, not below")


def write(rows: Rows, seeds: list[int], rounds: int) -> None:
    """Write the figures and the page."""
    tables = {
        "coverage": [coverage(rows, *key) for key in groups(rows, 50)],
        "sizes": [sizes(rows, *key) for key in groups(rows, 20, kinds=("client",))],
    }
    settings = {"seeds": seeds, "rounds": rounds, "coverage": COVERAGE, "band": BAND}
    text = json.dumps({"settings": settings, **tables}, indent=1) + "\n"
    (RESULTS / "conformal.json").write_text(text, encoding="utf-8")
    (RESULTS / "conformal.md").write_text(page(tables, rows, seeds, rounds), encoding="utf-8")


def groups(rows: Rows, samples: int, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Any]:
    """Return data set, method and kind of every line of a table, where there are rows."""
    keys = [(data, method, kind) for data in DATA for method in METHODS for kind in kinds]
    return [(*key, samples) for key in keys if chosen(rows, *key, samples)]


def chosen(
    rows: Rows, data: str, method: str, kind: str, samples: int, *, raw: bool = True
) -> Rows:
    """Return the rows of one line of a table: one per client and seed."""
    wanted = {"data": data, "method": method, "kind": kind, "samples": samples, "raw": raw}
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def coverage(rows: Rows, data: str, method: str, kind: str, samples: int) -> dict[str, Any]:
    """Return the coverage of one kind of set, and how often it lies within each band."""
    exact = chosen(rows, data, method, kind, samples)
    given = chosen(rows, data, method, kind, samples, raw=False)
    found = {"data": data, "method": method, "kind": kind, "pairs": len(exact)}
    found["coverage"] = mean(row["covered"] / row["tests"] for row in exact)
    found["size"] = mean(row["size"] for row in exact)
    within = [bands(row) for row in exact]
    found |= {band: mean(one[band] for one in within) for band in within[0]}
    found["coverage, never empty"] = mean(row["covered"] / row["tests"] for row in given)
    found["not below, never empty"] = mean(bands(row)["not below"] for row in given)
    return found


def sizes(rows: Rows, data: str, method: str, kind: str, samples: int) -> dict[str, Any]:
    """Return the sizes of local and of federated sets, as they are given, paired by seed."""
    local = by_seed(chosen(rows, data, method, kind, samples, raw=False))
    found: dict[str, Any] = {"data": data, "method": method, "client": mean(local.values())}
    for other in ("shrunk", "federated"):
        theirs = by_seed(chosen(rows, data, method, other, samples, raw=False))
        ratios = [theirs[seed] / local[seed] for seed in local]
        found[other] = mean(theirs.values())
        found[f"{other} ratio"] = mean(theirs.values()) / mean(local.values())
        found[f"{other} error"] = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return found


def by_seed(rows: Rows) -> dict[int, float]:
    """Return the mean size over clients by seed."""
    seeds = sorted({row["seed"] for row in rows})
    return {seed: mean(row["size"] for row in rows if row["seed"] == seed) for seed in seeds}


def page(tables: dict[str, Rows], rows: Rows, seeds: list[int], rounds: int) -> str:
    """Return docs/results/conformal.md."""
    head = ["data", "method", "sets", "coverage", "size", *BANDS]
    body = [
        [line["data"], line["method"], line["kind"]]
        + [f"{line[name]:.3f}" for name in ("coverage", "size")]
        + [f"{line[band]:.2f}" if band in line else "-" for band in BANDS]
        for line in tables["coverage"]
    ]
    never = [
        [
            *(line["data"], line["method"], line["kind"]),
            *(f"{line['coverage, never empty']:.3f}", f"{line['not below, never empty']:.2f}"),
        ]
        for line in tables["coverage"]
    ]
    size = [
        [line["data"], line["method"]]
        + [f"{line[kind]:.3f}" for kind in ("client", "shrunk", "federated")]
        + [f"{line[f'{kind} ratio']:.3f} ± {line[f'{kind} error']:.3f}" for kind in OTHERS]
        for line in tables["sizes"]
    ]
    ratios = [line["federated ratio"] for line in tables["sizes"]]
    pooled = mean(line["federated"] for line in tables["sizes"])
    pooled /= mean(line["client"] for line in tables["sizes"])
    accuracies = {
        (data, method): mean(row["accuracy"] for row in chosen(rows, data, method, "client", 50))
        for data, method, *_ in groups(rows, 50, kinds=("client",))
    }
    tests = {data: {row["tests"] for row in rows if row["data"] == data} for data in DATA}
    return PAGE.format(
        first=min(seeds),
        last=max(seeds),
        rounds=rounds,
        tests=", ".join(f"{max(found)} on {data}" for data, found in tests.items() if found),
        accuracies=", ".join(f"{m} on {d} {a:.3f}" for (d, m), a in accuracies.items()),
        coverage=table(head, body),
        never=table(["data", "method", "sets", "coverage", "not below"], never),
        sizes=table(
            ["data", "method", *("client", "shrunk", "federated"), *(f"{o} ratio" for o in OTHERS)],
            size,
        ),
        met=verdict(tables["coverage"]),
        ratio=f"{mean(ratios):.3f}",
        pooled=f"{pooled:.3f}",
        sized="met" if mean(ratios) <= 0.9 else "missed",
        each=", ".join(f"{r:.3f}" for r in ratios),
    )


def verdict(lines: Rows) -> str:
    """Say for every kind of set in which settings at least 95 % of pairs lie within each band."""
    settings = len(lines) // len(KINDS)
    rows = []
    for kind in KINDS:
        mine = [line for line in lines if line["kind"] == kind]
        counts = [sum(line.get(band, 0) >= 0.95 for line in mine) for band in BANDS]
        shown = zip(BANDS, counts, strict=True)
        rows.append([kind, *(str(count) if band in mine[0] else "-" for band, count in shown)])
    return table([f"sets (of {settings} settings)", *BANDS], rows)


def table(head: list[str], body: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


PAGE = """# Coverage and size of conformal sets

```
python benchmarks/conformal_coverage.py
```

Sets of coverage 0.9 on test samples, ten clients, seeds {first} to {last}, {rounds} rounds;
nothing is chosen on these samples. mnist5k is divided at random, Fashion-MNIST by labels: five
classes per client, 50 training samples per class. `fedavg` gives all clients one model, `fedper`
each its own head. Of the training samples, 50 or 20 per client are held out for calibration. Test
samples per client: {tests}. Accuracies with 50 calibration samples: {accuracies}.

*Sets* names whose calibration samples give the threshold (`bfl show calibrator conformal`):
`client`, its own; `federated`, the sum of all clients' histograms; `shrunk`, the client's own and
the others' as 50 samples. A *confidence* of .95 demands that 95 of 100 draws of the calibration
samples give the coverage.

## Which band is right

The guarantee is about calibration and test samples together. Given n calibration samples, the
coverage of a new sample is Beta(k, n + 1 - k) distributed, k = ceil(.9 (n + 1)) (Vovk 2012). For
n = 50 its standard deviation is .041, however many test samples there are. So

* *binomial*, two-sided: the 99 % band of Binomial(tests, .9). It ignores that the coverage varies
  with the calibration samples. With 4750 test samples it is .889 to .911, where Beta(46, 5) lies
  with probability .20: with 50 calibration samples of its own, no client can be sure to meet it.
* *not below*: at least the 1 % quantile of Binomial(tests, .9). A set that covers more than asked
  for is no failure here.
* *beta-binomial*, two-sided and *not below*: the same bands of the exact distribution of the number
  of covered test samples (none for the weighted samples of `shrunk`). The calibration samples of
  all clients are exchangeable with one client's test samples only where the clients are alike
  (mnist5k). On Fashion-MNIST their classes differ: federated sets promise the coverage of a sample
  of a random client, and a client may be above or below.

## Coverage with 50 calibration samples per client

Sets that may be empty (`-o calibrator.conformal.empty=true`), as in the theory. The last four
columns give the share of client x seed pairs within each band.

{coverage}

In how many settings at least 95 % of the pairs lie within a band:

{met}

Sets as users get them, with the most probable class always in:

{never}

## Size with 20 calibration samples per client

Mean number of classes in a set, as users get it; ratios to the client's own sets, with the standard
error over seeds.

{sizes}

The demand was at most .9 on average. The mean of the federated ratios ({each}) is {ratio}, the
ratio of the mean sizes {pooled}: {sized}.
"""


if __name__ == "__main__":
    main()
