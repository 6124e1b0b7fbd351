"""What each departure of EM-TDAMP from the paper is worth: one at a time taken back.

    python benchmarks/tdamp_departures.py --rounds 10
    python benchmarks/tdamp_departures.py --clients 10 --sweeps 10 --rounds 5

On mnist5k. The last two lines are the printed form (`em-tdamp-paper`), on its own and with the line
search. Differences are from the first line, paired by seed; nan: training ended without a valid
result.
"""

from __future__ import annotations

import argparse
from typing import Any

from tdamp_training import table

TAKEN_BACK: dict[str, dict[str, Any]] = {
    "default": {},
    "no forgetting": {"forgetting": 1.0},
    "no momentum": {"momentum": 0.0},
    "no pooled counts": {"pooled": False},
    "not centred": {"centred": False},
    "output scale 1": {"output_scale": 1.0},
    "counted as trained": {"count_once": False},
    "Module B": {"rho": 0.9},
    "full steps": {"line_search": False},
}


def main() -> None:
    """Print a line for every departure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--sweeps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.data, arguments.test_fraction = "mnist5k", 0.2016
    rows = [
        (label, "em-tdamp", options, {"": {}})
        for label, options in TAKEN_BACK.items()
        if arguments.clients > 1 or "pooled" not in options  # n/n_k is 1
    ]
    printed = [
        ("as printed", "em-tdamp-paper", {}, {"": {}}),
        ("as printed, searched", "em-tdamp-paper", {"line_search": True}, {"": {}}),
    ]
    table(arguments, [*rows, *printed], "default")


if __name__ == "__main__":
    main()
