"""Memory of a run with a thousand clients of 80,000 parameters, ten of them a round.

Prints the largest sum, over the run's processes, of what each holds resident and shares with
nobody or in part (PSS), early and late in the run: it must not grow with the rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BFL = str(Path(sys.executable).with_name("bfl"))
RUN = (
    "--data mnist5k --partition iid --clients 1000 --cohort 10 --rounds 40 --eval-every 20 --quiet"
    " -o inference.local_epochs=1"
)
# Personal heads, and the most that there can be: a whole network for every client.
METHODS = ("superfed-mm", "bpfed")


def main() -> None:
    """Print one line a method."""
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            words = [BFL, "run", method, *RUN.split(), "--workers", "2", "--out", str(run)]
            process = subprocess.Popen(words)
            samples = []
            while process.poll() is None:
                samples.append(resident(process.pid))
                time.sleep(0.2)
            if process.returncode:
                raise SystemExit(process.returncode)
            half = samples[len(samples) // 4 : len(samples) // 2]
            line = {
                "benchmark": f"{method}, 1000 clients, 80,000 parameters, peak memory",
                "gib": round(max(samples) / 2**30, 2),
                "gib_second_quarter": round(max(half) / 2**30, 2),
                "allowed": "<= 1.5",
            }
            print(json.dumps(line), flush=True)


def resident(pid: int) -> int:
    """Return bytes of a process and its children, shared pages divided among their holders."""
    total = 0
    for process in [pid, *descendants(pid)]:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it ended meanwhile
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total * 1024


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they did."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in tasks.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


if __name__ == "__main__":
    main()
