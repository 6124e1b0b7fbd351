"""Checks of likelihoods: a loss per sample, and predictions in the shape of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bflcore.problem.likelihoods import Likelihood
from bflcore.testing import problems

__all__ = ["checks_of"]

Part = type[Likelihood]

N, C = 6, 3  # samples, and classes or targets


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of a likelihood."""
    yield from (names_its_task, gives_a_loss_per_sample, predicts_in_the_shape_of_the_outputs)


def names_its_task(part: Part) -> None:
    """`task` is classification or regression."""
    if getattr(part, "task", None) not in ("classification", "regression"):
        raise AssertionError(
            f"task is {getattr(part, 'task', None)!r}; allowed: 'classification' or 'regression'"
        )


def gives_a_loss_per_sample(part: Part) -> None:
    """`nll` of outputs ``[N, C]`` is ``[N]`` and finite, and independent between samples."""
    outputs = torch.randn(N, C, generator=problems.generator())
    classes = part.task == "classification"
    targets = torch.arange(N) % C if classes else outputs.flip(0)
    losses = part().nll(outputs, targets)
    if tuple(losses.shape) != (N,) or not losses.isfinite().all():
        raise AssertionError(f"nll gives {losses}; expected {N} finite numbers")
    alone = part().nll(outputs[:1], targets[:1])
    if not torch.allclose(alone, losses[:1]):
        raise AssertionError(f"the first sample's loss is {float(losses[0])}, alone {float(alone)}")


def predicts_in_the_shape_of_the_outputs(part: Part) -> None:
    """Draws are ``[K, S, B, C]`` like the outputs: probabilities, or means with a noise."""
    outputs = torch.randn(2, 4, N, C, generator=problems.generator())
    found = part().predictive(outputs)
    draws, noise = found.draws, found.noise
    if draws.shape != outputs.shape:
        raise AssertionError(f"draws are {tuple(draws.shape)}, the outputs {tuple(outputs.shape)}")
    if part.task == "classification":
        if not (draws >= 0).all() or not torch.allclose(draws.sum(-1), torch.ones(2, 4, N)):
            raise AssertionError("draws are not probabilities: they must be >= 0 and sum to one")
    elif noise is None or not (noise > 0).all():
        raise AssertionError(f"noise is {noise}; a regression needs a variance above 0")
