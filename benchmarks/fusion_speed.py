"""Fusion against ``torch.sum`` over the same tensors, and the memory of adding clients one by one.

Speed: 100 Gaussian posteriors of a million parameters, float32, one thread. The yardstick sums
means and variances over the client axis. Memory: a thousand clients, each dropped once it is
added; how far the peak of a process's resident memory rises, in units of one client's posterior
(8 MB), that client's own included. Order statistics need all posteriors and do not stream.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys

import torch
from problems import alternate, report

from bflcore import AdditiveAggregator, Aggregator, Gaussian
from bflcore.registry.loading import load_registry

CLIENTS, PARAMETERS = 100, 1_000_000
MANY = 1000
ORDER_STATISTICS = "none: it sorts"


def main() -> None:
    """Print a line of memory per rule that streams, then a line of speed per rule."""
    torch.set_num_threads(1)
    parts = [part for part in load_registry().aggregators.values() if "gaussian" in part.families]
    for part in parts:  # first: a process inherits the peak of the one that starts it
        if issubclass(part, AdditiveAggregator):
            memory(part.name)
    speed(parts)


def speed(parts: list[type[Aggregator]]) -> None:
    """Time every rule in turn with the yardstick."""
    posteriors, prior = gaussian(CLIENTS, PARAMETERS), gaussian(PARAMETERS)
    weights = torch.rand(CLIENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def summed() -> tuple[torch.Tensor, torch.Tensor]:
        return posteriors.mean.sum(0), posteriors.variance.sum(0)

    for part in parts:
        rule, additive = part(), issubclass(part, AdditiveAggregator)
        ours, theirs = alternate(
            lambda rule=rule: rule.fuse(posteriors, weights, prior),
            summed,
            repeats=9 if additive else 3,
        )
        allowed = "<= 2.00" if additive else ORDER_STATISTICS
        report(f"{rule.name}, K = 100, P = 1e6 / torch.sum", allowed, ours, theirs)


def gaussian(*shape: int) -> Gaussian:
    """Return posteriors with variances from a half to three halves."""
    noise = torch.Generator().manual_seed(0)
    return Gaussian(torch.randn(shape, generator=noise), torch.rand(shape, generator=noise) + 0.5)


def memory(name: str) -> None:
    """Measure in a fresh process, whose memory nobody has stretched before."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        ratio = pool.apply(stream, (name,))
    line = {
        "benchmark": f"{name}, K = {MANY} one by one, peak memory / one posterior",
        "ratio": round(ratio, 2),
        "allowed": "<= 4.00",
    }
    print(json.dumps(line), flush=True)


def stream(name: str) -> float:
    """Fuse clients one by one, as within a block of a round; return the rise of the peak."""
    torch.set_num_threads(1)
    rule = load_registry().aggregators[name]()
    weight = torch.ones(1, dtype=torch.float64)
    small, prior = gaussian(1, 10), gaussian(PARAMETERS)
    rule.finish(rule.add(rule.start(small[0]), small, weight))  # loads what it imports
    before = peak()
    state = rule.start(prior)
    for _ in range(MANY):
        client = prior.map(lambda tensor: tensor[None] * 0.99)
        state = rule.add(state, client, weight)
        del client
    rule.finish(state)
    return (peak() - before) / sum(tensor.nbytes for tensor in prior.pack().values())


def peak() -> int:
    """Return the highest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
