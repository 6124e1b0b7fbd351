"""EM-TDAMP from any first noise variance: does it diverge?

    python benchmarks/tdamp_noise.py boston --rounds 20
    python benchmarks/tdamp_noise.py mnist5k --rounds 3

Twenty seeds, each with a first variance that is log-uniform in [0.01, 100]. Prints how many
posteriors were valid throughout, and the test error's range at the end beside that of the default.
"""

from __future__ import annotations

import argparse

import numpy as np
from tdamp_training import NETS, error, figures, prepared, train

SEEDS = 20
EXPONENTS = (-2.0, 2.0)  # of ten


def final(arguments: argparse.Namespace, seed: int, noise: float) -> tuple[bool, float]:
    """Return whether every round's posterior was valid, and the last error."""
    run = prepared(arguments, "em-tdamp", seed, noise=noise)
    sent = [broadcast for broadcast, _ in train(run, arguments.rounds)]
    valid = not any(broadcast.start.invalid() for broadcast in sent)
    return valid, error(figures(run, sent[-1])) if valid else float("nan")


def main() -> None:
    """Print a line for drawn variances and one for the default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(NETS))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    arguments.clients, arguments.sweeps, arguments.test_fraction = 1, 1, 0.2016
    drawn = 10 ** np.random.default_rng(0).uniform(*EXPONENTS, SEEDS)
    for name, variances in (("drawn", drawn), ("1", np.ones(SEEDS))):
        found = [final(arguments, seed, float(v)) for seed, v in enumerate(variances)]
        errors = [value for _, value in found]
        print(
            f"first variance {name}: {sum(valid for valid, _ in found)} of {SEEDS} valid, error",
            f"{np.median(errors):.4f} (median), {min(errors):.4f} to {max(errors):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
