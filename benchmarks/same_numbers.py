"""Whether two checkouts give the same numbers, bit for bit: for changes that must not change any.

    python benchmarks/same_numbers.py record OLD_ENVIRONMENT/bin/bfl old
    python benchmarks/same_numbers.py record NEW_ENVIRONMENT/bin/bfl new
    python benchmarks/same_numbers.py compare old new

`record` runs every method for three rounds on small data, and variants that take other paths
through the code: worker processes, a run that is killed and resumed, a simulation engine. `compare`
requires every line of every ``metrics.jsonl`` to be equal, times apart; it exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SMALL = [
    "--data",
    "digits",
    "--clients",
    "5",
    "--partition",
    "labels:5",
    "--train-per-class",
    "8",
    "--rounds",
    "3",
    "--seed",
    "7",
    "--model",
    "mlp",
    "--eval-every",
    "1",
    "--local-epochs",
    "2",
    "--batch-size",
    "16",
    "--workers",
    "1",
]

METHODS = [
    "bpfed",
    "fedsi",
    "fedsi-fac",
    "superfed-mm",
    "superfed-lm",
    "em-tdamp",
    "mc-dropout",
    "fedvi",
    "fedavg",
    "fedavg-ft",
    "fedprox",
    "scaffold",
    "fedper",
    "fedrep",
    "fedbabu",
    "lg-fedavg",
    "per-fedavg",
    "apfl",
    "pfedme",
    "ditto",
    "pfedbayes",
    "fedpop",
    "sgd-group-sparse",
    "group-snip",
    "local",
]

# Name of a run -> method and flags after the common ones; a later flag wins.
VARIANTS = {
    "two-workers": "bpfed --workers 2",
    "chunks": "fedavg -o engine.chunk=3",
    "simulation": "bpfed --engine flower",
    "reinforced": "bpfed -o inference.reinforce_steps=1",
    "flipout-draws": "fedvi -o inference.estimator=flipout -o inference.draws=2",
    "reparameterisation": "fedvi -o inference.estimator=reparameterisation",
    "empirical-bayes": "bpfed --hyper empirical-bayes",
    "pretrained": "fedvi --pretrain 0.2 --aggregator weight-consolidation",
    "conflation": "fedvi --aggregator conflation",
    "linear-pool": "fedvi --aggregator linear-pool",
    "median": "fedavg --aggregator median",
    "novel": "bpfed --novel-clients 1",
    "cohort": "apfl --cohort 3",
    "faults": "fedavg --drop-out 0.2 --corrupt 0.2 --rounds 6",
    "label-noise": "superfed-mm --label-noise pair:0.2",
    "regression": "fedvi --data boston --partition iid",
}
RESUMED = "bpfed --rounds 40"


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("bfl", type=Path)
    recording.add_argument("folder", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("left", type=Path)
    comparing.add_argument("right", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.bfl, given.folder)
    else:
        sys.exit(compare(given.left, given.right))


def record(bfl: Path, folder: Path) -> None:
    """Run everything, two runs at a time; each run's directory is `folder`/name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs = {method: [method] for method in METHODS}
    runs |= {name: words.split() for name, words in VARIANTS.items()}
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(_run, bfl, [words[0], *_common(words), *words[1:]], folder / name)
            for name, words in runs.items()
        ]
        for one in waiting:
            one.result()
    method, *flags = RESUMED.split()
    _resumed(bfl, [method, *_common(flags), *flags], folder / "resumed")


def _common(words: list[str]) -> list[str]:
    """Return the common flags, without per-class sizes where a run's data have no classes."""
    if "boston" not in words:
        return SMALL
    first = SMALL.index("--train-per-class")
    return SMALL[:first] + SMALL[first + 2 :]


def _run(bfl: Path, arguments: list[str], out: Path) -> None:
    command = [str(bfl), "run", *arguments, "--quiet", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        print(f"{out.name}: exit status {done.returncode}: {done.stderr.strip()}", file=sys.stderr)


def _resumed(bfl: Path, arguments: list[str], out: Path) -> None:
    """Kill a run after its third evaluation, then resume it."""
    command = [str(bfl), "run", *arguments, "--quiet", "--out", str(out)]
    process = subprocess.Popen(command, env=_environment())
    metrics = out / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or len(_lines(out)) < 3):
        time.sleep(0.002)
    process.kill()
    process.wait()
    subprocess.run([str(bfl), "resume", str(out), "--quiet"], env=_environment(), check=False)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _lines(run: Path) -> list[dict[str, object]]:
    path = run / "metrics.jsonl"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # being written
            continue
        record.pop("seconds")
        found.append(record)
    return found


def compare(left: Path, right: Path) -> int:
    """Print a line per run; return 1 when one of them differs."""
    names = sorted({path.name for folder in (left, right) for path in folder.iterdir()})
    different = 0
    for name in names:
        one, two = _lines(left / name), _lines(right / name)
        same = bool(one) and one == two
        different += not same
        print(f"{name:20} {'equal' if same else 'DIFFERENT'}  {len(one)} and {len(two)} rounds")
        if not same and one and two:
            record, other = next(pair for pair in zip(one, two, strict=False) if pair[0] != pair[1])
            keys = [key for key in record | other if record.get(key) != other.get(key)]
            print(f"  round {record['round']}: {', '.join(keys)}")
    return int(different > 0)


if __name__ == "__main__":
    main()
