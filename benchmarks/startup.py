"""``bfl list-plugins`` as a whole process: seconds, and whether torch was imported."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time


def main() -> None:
    """Print the median over several starts."""
    command = [sys.executable, "-m", "bflcore.cli", "list-plugins"]
    times = []
    for _ in range(8):
        clock = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - clock)
    verbose = [sys.executable, "-X", "importtime", *command[1:]]
    trace = subprocess.run(verbose, check=True, capture_output=True, text=True).stderr
    imported = any(line.rpartition("|")[2].strip() == "torch" for line in trace.splitlines())
    line = {
        "benchmark": "bfl list-plugins, whole process",
        "seconds": round(statistics.median(times[1:]), 3),
        "allowed": "< 0.5",
        "imports_torch": imported,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
