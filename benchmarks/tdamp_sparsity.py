"""Group sparsity: EM-TDAMP beside Adam whose groups are pruned by three scores.

    python benchmarks/tdamp_sparsity.py mnist5k --rounds 20 --seeds 3
    python benchmarks/tdamp_sparsity.py boston --rounds 100 --seeds 4

A group is a column of a weight matrix, all that leaves one input or neuron. Every method keeps
exactly the target share of all groups; `METHODS` says which there are, and another one is another
entry: (run, arguments, target, rate, penalty) -> (groups kept, groups in all, test error, test
loss). The loss is the NLL in nats, or for a regression the error, the normalised squared one. Adam
trains for two thirds of the epochs, is pruned layer by layer, and trains the rest with what is
kept. Its score is the norm of a column, or the variance of what the column adds to the next layer
("effect": squared norm times the variance of its input). Its learning rate and penalty are those
of the least loss on a fifth of the training samples, held out for the choice. Prints means over
seeds, and the difference of the error from the first method's, paired by seed, with its standard
error.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from tdamp_training import BATCH, NETS, error, figures, held_out, prepared, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bflcore import Problem
from bflcore.experiments.prepare import Prepared
from bflcore.randomness import SERVER, stream
from bflcore.testing.problems import surveyed

TARGETS = (0.5, 0.3, 0.2, 0.1)
SETTINGS = [(rate, penalty) for rate in (3e-3, 1e-2) for penalty in (1e-4, 1e-3)]

Found = tuple[int, int, float, float]


def tdamp(run: Prepared, arguments: argparse.Namespace, target: float, *_: float) -> Found:
    """EM-TDAMP, which removes groups until two thirds of the epochs are over."""
    hyper = attrs.evolve(run.experiment.hyper, target=target, deadline=2 * arguments.rounds // 3)
    run = attrs.evolve(run, experiment=attrs.evolve(run.experiment, hyper=hyper))
    *_, (broadcast, _) = train(run, arguments.rounds)
    kept = broadcast.start.probability >= 0.5
    row = figures(run, broadcast)
    return int(kept.sum()), kept.numel(), error(row), row["nll"] if "ece" in row else error(row)


def magnitude(
    run: Prepared,
    arguments: argparse.Namespace,
    target: float,
    rate: float,
    penalty: float = 0.0,
    score: Callable[[Tensor, Tensor], Tensor] = lambda w, _: w.norm(dim=0),
) -> Found:
    """Adam, then the columns of the largest `score` of every layer, then Adam again."""
    problem = surveyed(run.experiment.inference, run.problem)
    network = copy.deepcopy(problem.network).requires_grad_(True)
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
    weights = [m.weight for m in linear]
    masks = [torch.ones_like(w) for w in weights]
    rule = torch.optim.Adam(network.parameters(), lr=rate)
    shuffle = stream(problem.seed, SERVER, SERVER, "shuffle")
    cut = 2 * arguments.rounds // 3
    for epoch in range(arguments.rounds):
        if epoch == cut:
            inputs = _inputs(network, linear, problem.train.of(0)[0])
            scores = [score(w.detach(), u) for w, u in zip(weights, inputs, strict=True)]
            masks = _masks(weights, scores, target)
        sweep(problem, network, rule, shuffle, weights, masks, penalty if epoch < cut else 0.0)
    kept = sum(int(mask[0].sum()) for mask in masks)
    return kept, sum(w.shape[1] for w in weights), *_losses(problem, network)


def effect(
    run: Prepared, arguments: argparse.Namespace, target: float, rate: float, penalty: float = 0.0
) -> Found:
    """As `magnitude`, with the variance of what a column adds to the next layer as its score."""
    return magnitude(
        run, arguments, target, rate, penalty, lambda w, u: w.square().sum(0) * u.var(0)
    )


METHODS: dict[str, tuple[Callable[..., Found], list[tuple[float, ...]]]] = {
    "EM-TDAMP": (tdamp, [()]),
    "Adam, magnitude": (magnitude, sorted({(rate,) for rate, _ in SETTINGS})),
    "Adam, effect": (effect, sorted({(rate,) for rate, _ in SETTINGS})),
    "Adam, group lasso": (magnitude, list(SETTINGS)),
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
    """Train for one epoch; masked columns stay zero.

    The group lasso adds `penalty` times every column's norm, times the root of its size.
    """
    x, y = problem.train.of(0)
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


def _inputs(network: nn.Module, linear: list[nn.Linear], x: Tensor) -> list[Tensor]:
    """Return the inputs ``[B, N]`` of every layer."""
    seen: list[Tensor] = []
    handles = [
        m.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for m in linear
    ]
    with torch.no_grad():
        network(x)
    for handle in handles:
        handle.remove()
    return seen


def _masks(weights: list[nn.Parameter], scores: list[Tensor], target: float) -> list[Tensor]:
    """Keep the best columns of every layer; the first layers' counts round to the total."""
    sizes = [w.shape[1] for w in weights]
    ends = [round(target * sum(sizes[: i + 1])) for i in range(len(sizes))]
    masks = []
    for w, score, count in zip(weights, scores, np.diff([0, *ends]), strict=True):
        kept = torch.zeros(w.shape[1])
        kept[score.topk(int(count)).indices] = 1
        masks.append(kept.expand_as(w))
    return masks


def _losses(problem: Problem, network: nn.Module) -> tuple[float, float]:
    x, y = problem.test.of(0)
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
    first: dict[float, Any] = {}  # errors of the first method, by target
    for name in arguments.methods:
        method, settings = METHODS[name]
        runs = [prepared(arguments, "em-tdamp" if method is tdamp else "fedavg", s) for s in seeds]
        apart = [held_out(run, seed) for run, seed in zip(runs, seeds, strict=True)]
        for target in TARGETS:
            setting = settings[0]
            if len(settings) > 1:
                losses = [
                    np.mean([method(run, arguments, target, *one)[3] for run in apart])
                    for one in settings
                ]
                setting = settings[int(np.argmin(losses))]
            found = [method(run, arguments, target, *setting) for run in runs]
            counts = "/".join(str(kept) for kept, *_ in found)
            errors = np.array([row[2] for row in found])
            line = f"{name:18s} {target:.1f} kept {counts} of {found[0][1]}: error"
            line += f" {errors.mean():.4f} loss {np.mean([row[3] for row in found]):.4f}"
            gaps = errors - first.setdefault(target, errors)
            if name != arguments.methods[0] and len(gaps) > 1:
                spread = gaps.std(ddof=1) / len(gaps) ** 0.5
                line += f" difference {gaps.mean():+.4f} +- {spread:.4f}"
            print(line, setting or "", flush=True)


if __name__ == "__main__":
    main()
