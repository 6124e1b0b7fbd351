"""Group sparsity: EM-TDAMP beside Adam whose groups are pruned by magnitude or by group lasso.

    python benchmarks/tdamp_sparsity.py mnist5k --rounds 20 --seeds 2
    python benchmarks/tdamp_sparsity.py boston --rounds 100 --seeds 4

A group is a column of a weight matrix, all that leaves one input or neuron. Every method keeps
exactly the target share of all groups; `METHODS` says which there are, and another one is another
entry: (arguments, seed, target, rate) -> (groups kept, groups in all, test error, test loss). The
loss is the NLL in nats, or for a regression the error, the normalised squared one. Adam trains for
two thirds of the epochs, is pruned layer by layer, and trains the rest with what is kept; both
have the setting of the least loss in a grid of learning rates and penalties, on the test samples.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import numpy as np
import torch
from tdamp_training import BATCH, NETS, error, figures, prepared, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bflcore import Problem
from bflcore.randomness import SERVER, stream

TARGETS = (0.5, 0.3, 0.2, 0.1)
SETTINGS = [(rate, penalty) for rate in (3e-3, 1e-2) for penalty in (1e-4, 1e-3)]

Found = tuple[int, int, float, float]


def tdamp(arguments: argparse.Namespace, seed: int, target: float, *_: float) -> Found:
    """EM-TDAMP, which removes groups until two thirds of the epochs are over."""
    hyper = {"target": target, "deadline": 2 * arguments.rounds // 3}
    run = prepared(arguments, "em-tdamp", seed, hyper=hyper)
    *_, (broadcast, _) = train(run, arguments.rounds)
    kept = broadcast.start.probability >= 0.5
    row = figures(run, broadcast)
    return int(kept.sum()), kept.numel(), error(row), row["nll"] if "ece" in row else error(row)


def magnitude(
    arguments: argparse.Namespace, seed: int, target: float, rate: float, penalty: float = 0.0
) -> Found:
    """Adam, then the columns of the largest norms of every layer, then Adam again."""
    problem = prepared(arguments, "fedavg", seed).problem
    network = copy.deepcopy(problem.network).requires_grad_(True)
    weights = [m.weight for m in network.modules() if isinstance(m, nn.Linear)]
    masks = [torch.ones_like(w) for w in weights]
    rule = torch.optim.Adam(network.parameters(), lr=rate)
    shuffle = stream(seed, SERVER, SERVER, "shuffle")
    cut = 2 * arguments.rounds // 3
    for epoch in range(arguments.rounds):
        if epoch == cut:
            masks = _masks(weights, target)
        sweep(problem, network, rule, shuffle, weights, masks, penalty if epoch < cut else 0.0)
    kept = sum(int(mask[0].sum()) for mask in masks)
    return kept, sum(w.shape[1] for w in weights), *_losses(problem, network)


def lasso(
    arguments: argparse.Namespace, seed: int, target: float, rate: float, penalty: float
) -> Found:
    """As `magnitude`, with `penalty` times every column's norm, times the root of its size."""
    return magnitude(arguments, seed, target, rate, penalty)


METHODS: dict[str, tuple[Callable[..., Found], list[tuple[float, ...]]]] = {
    "EM-TDAMP": (tdamp, [()]),
    "Adam, magnitude": (magnitude, sorted({(rate,) for rate, _ in SETTINGS})),
    "Adam, group lasso": (lasso, list(SETTINGS)),
}


def sweep(
    problem: Problem,
    network: nn.Module,
    rule: torch.optim.Optimizer,
    shuffle: torch.Generator,
    weights: list[nn.Parameter],
    masks: list[Tensor],
    penalty: float,
) -> None:
    """Train for one epoch; masked columns stay zero."""
    x, y = problem.train.x, problem.train.y
    for index in torch.randperm(len(x), generator=shuffle).split(problem_batch(problem)):
        loss = problem.likelihood.nll(network(x[index]), y[index]).mean()
        if penalty:
            norms = [w.norm(dim=0).sum() * w.shape[0] ** 0.5 for w in weights]
            loss = loss + penalty * torch.stack(norms).sum()
        rule.zero_grad()
        loss.backward()
        rule.step()
        with torch.no_grad():
            for w, mask in zip(weights, masks, strict=True):
                w.mul_(mask)


def problem_batch(problem: Problem) -> int:
    """Return the minibatches' size on this data."""
    return BATCH["boston"] if problem.likelihood.task == "regression" else 100


def _masks(weights: list[nn.Parameter], target: float) -> list[Tensor]:
    """Keep the largest columns of every layer; the first layers' counts round to the total."""
    sizes = [w.shape[1] for w in weights]
    ends = [round(target * sum(sizes[: i + 1])) for i in range(len(sizes))]
    masks = []
    for w, count in zip(weights, np.diff([0, *ends]), strict=True):
        kept = torch.zeros(w.shape[1])
        kept[w.detach().norm(dim=0).topk(int(count)).indices] = 1
        masks.append(kept.expand_as(w))
    return masks


def _losses(problem: Problem, network: nn.Module) -> tuple[float, float]:
    x, y = problem.test.x, problem.test.y
    with torch.no_grad():
        z = network(x)
    if problem.likelihood.task == "classification":
        return float((z.argmax(1) != y).float().mean()), float(cross_entropy(z, y))
    nmse = float((z - y).square().sum() / (y - y.mean(0)).square().sum())
    return nmse, nmse


def main() -> None:
    """Print a line for every method and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(NETS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    arguments.clients, arguments.sweeps, arguments.test_fraction = 1, 1, 0.2016
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for name in arguments.methods:
        method, settings = METHODS[name]
        for target in TARGETS:
            best: tuple[float, str] | None = None
            for setting in settings:
                found = [method(arguments, seed, target, *setting) for seed in seeds]
                counts = "/".join(str(kept) for kept, *_ in found)
                wrong, loss = np.mean([row[2:] for row in found], 0)
                line = f"{name:18s} {target:.1f} kept {counts} of {found[0][1]}:"
                line += f" error {wrong:.4f} loss {loss:.4f} {setting or ''}"
                best = min(best, (loss, line)) if best else (loss, line)
            print(best[1] if best else "", flush=True)


if __name__ == "__main__":
    main()
