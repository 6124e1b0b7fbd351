"""Fusion against ``torch.sum`` over the same tensors, and the memory of adding clients one by one.

Speed: 100 Gaussian posteriors of a million parameters, float32, one thread. The yardstick sums
means and variances over the client axis. Memory: a thousand clients, each dropped once it is
added; the peak of the tensors alive at once, in units of one client's posterior.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from problems import alternate, report

from bflcore import AdditiveAggregator, Aggregator, Gaussian
from bflcore.registry import load_registry

CLIENTS, PARAMETERS = 100, 1_000_000
MANY, FEW = 1000, 250_000
ORDER_STATISTICS = "none: it sorts"


def main() -> None:
    """Print a line of speed a rule, then a line of memory a rule that streams."""
    torch.set_num_threads(1)
    rules = [part() for part in load_registry().all("aggregator") if "gaussian" in part.families]
    posteriors, prior = gaussian(CLIENTS, PARAMETERS), gaussian(PARAMETERS)
    weights = torch.rand(CLIENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def summed() -> tuple[torch.Tensor, torch.Tensor]:
        return posteriors.mean.sum(0), posteriors.variance.sum(0)

    for rule in rules:
        additive = isinstance(rule, AdditiveAggregator)
        ours, theirs = alternate(
            lambda rule=rule: rule.fuse(posteriors, weights, prior),
            summed,
            repeats=9 if additive else 3,
        )
        report(
            f"{rule.name}, K = 100, P = 1e6 / torch.sum",
            "<= 2.00" if additive else ORDER_STATISTICS,
            ours,
            theirs,
        )
    del posteriors, prior
    for rule in rules:
        if isinstance(rule, AdditiveAggregator):
            print(json.dumps(memory(rule)), flush=True)


def gaussian(*shape: int) -> Gaussian:
    """Return posteriors with variances from a half to three halves."""
    noise = torch.Generator().manual_seed(0)
    return Gaussian(torch.randn(shape, generator=noise), torch.rand(shape, generator=noise) + 0.5)


def memory(rule: AdditiveAggregator) -> dict[str, object]:
    """Return the peak above the prior while a thousand clients stream through `rule`."""
    prior = gaussian(FEW)
    posterior = sum(tensor.nbytes for tensor in prior.pack().values())
    weight = torch.ones(1, dtype=torch.float64)
    one_client(rule, prior, weight)  # what is allocated once, by the first call
    with peak_resident() as peak:
        one_client(rule, prior, weight, clients=MANY)
    return {
        "benchmark": f"{rule.name}, K = {MANY} one by one, peak memory / one posterior",
        "ratio": round(peak() / posterior, 2),
        "allowed": "<= 4.00",
    }


def one_client(
    rule: Aggregator, prior: Gaussian, weight: torch.Tensor, clients: int = 1
) -> Gaussian:
    """Add clients one by one, as the round loop does, and decode."""
    assert isinstance(rule, AdditiveAggregator)  # noqa: S101
    noise = torch.Generator().manual_seed(2)
    total: dict[str, torch.Tensor] = {}
    for _ in range(clients):
        mean = torch.randn(1, FEW, generator=noise)
        total = rule.accumulate(total, Gaussian(mean, mean.square().add_(0.5)), weight, prior)
        del mean
    return rule.decode(total, prior)


@contextmanager
def peak_resident() -> Iterator[Callable[[], int]]:
    """Yield a function for the highest resident memory since, in bytes above the beginning."""
    gc.collect()
    status, stop = Path("/proc/self/statm"), threading.Event()

    def resident() -> int:
        return int(status.read_text(encoding="ascii").split()[1]) * 4096

    highest = before = resident()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.0005):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: highest - before
    finally:
        stop.set()
        watcher.join()


if __name__ == "__main__":
    main()
