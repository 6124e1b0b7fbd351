"""Starting: ``bfl list-plugins`` as a whole process, and `bfl run` until its first line.

The first line of a run says what is about to happen; it comes after the data are loaded and the
network is built. ``import torch`` alone is what nothing can be faster than.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPEATS = 7
RUN = "fedavg --data mnist5k --clients 10 --rounds 1 --local-epochs 1 --workers 1 --out"


def main() -> None:
    """Print the medians over several starts."""
    listing = [sys.executable, "-m", "bflcore.cli", "list-plugins"]
    verbose = [sys.executable, "-X", "importtime", *listing[1:]]
    trace = subprocess.run(verbose, check=True, capture_output=True, text=True).stderr
    imported = any(line.rpartition("|")[2].strip() == "torch" for line in trace.splitlines())
    line = {
        "benchmark": "bfl list-plugins, whole process",
        "seconds": median_seconds(listing),
        "allowed": "< 0.5",
        "imports_torch": imported,
    }
    print(json.dumps(line))
    torch = median_seconds([sys.executable, "-c", "import torch"])
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, str(i)) for i in range(REPEATS)]
        times = [first_line([*listing[:-1], "run", *RUN.split(), str(run)]) for run in runs]
    line = {
        "benchmark": "bfl run, first line",
        "seconds": round(statistics.median(times), 3),
        "seconds_importing_torch": torch,
        "allowed": "< seconds_importing_torch + 1",
    }
    print(json.dumps(line))


def median_seconds(command: Sequence[str]) -> float:
    """Return the median duration of a command, the first one left out."""
    times = []
    for _ in range(REPEATS + 1):
        clock = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - clock)
    return round(statistics.median(times[1:]), 3)


def first_line(command: Sequence[str]) -> float:
    """Return the seconds until a command's first line on standard error."""
    clock = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        process.stderr.readline()
        seconds = time.perf_counter() - clock
        process.stderr.read()
    return seconds


if __name__ == "__main__":
    main()
