"""The work that the benchmarks share: an MLP 784-100-10 and ten clients of 250 images each."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from bflcore import Categorical, Layout, Problem, Shares
from bflcore.randomness import seeded_globally

CLIENTS, SAMPLES, EPOCHS, BATCH = 10, 250, 10, 50


def network() -> nn.Sequential:
    """Return the MLP of the FedSI and BPFed tables."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def problem() -> Problem:
    """Return ten clients with random images: speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS * SAMPLES, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    with seeded_globally(0, "benchmark"):
        model = network()
    layout = Layout.of(model, "3", "all")
    indices = [list(range(i * SAMPLES, (i + 1) * SAMPLES)) for i in range(CLIENTS)]
    shares = Shares.gather(x, y, indices)
    initial = layout.flatten(dict(model.named_parameters()))
    clients = tuple(range(CLIENTS))
    return Problem(model, layout, Categorical(), shares, shares, initial, clients)


def alternate(*works: Callable[[], object], repeats: int = 7) -> list[list[float]]:
    """Time the works in turn, A B A B ..., so that drift of the machine hits them alike."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for index, work in enumerate(works):
            clock = time.perf_counter()
            work()
            times[index].append(time.perf_counter() - clock)
    return times


def report(name: str, allowed: str, ours: list[float], theirs: list[float]) -> None:
    """Print one JSON line: medians, and the median of the ratios pair by pair."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    print(
        json.dumps(
            {
                "benchmark": name,
                "ours_s": round(statistics.median(ours), 4),
                "theirs_s": round(statistics.median(theirs), 4),
                "ratio": round(statistics.median(ratios), 3),
                "allowed": allowed,
            }
        ),
        flush=True,
    )
