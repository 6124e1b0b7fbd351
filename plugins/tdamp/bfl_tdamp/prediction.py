"""Prediction in closed form, and what a problem must be for message passing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bfl_tdamp.channels import probit_probabilities
from bfl_tdamp.message_passing import first_variance, own
from bfl_tdamp.network import chain, forward, layers
from bflcore import OptionError, Predictive
from bflcore.inference.memory import join_personal

if TYPE_CHECKING:
    from bfl_tdamp.plugin import Tdamp
    from bfl_tdamp.posterior import BernoulliGaussian
    from bflcore import Posterior, Problem

__all__ = ["check", "outputs", "predict"]


def check(problem: Problem) -> None:
    """Refuse what message passing cannot work on.

    Raises `IncompatibleError` for a network that is no chain of linear layers and rectifiers, and
    `OptionError` where it has not one output a target.
    """
    last = chain(problem)[-1]
    outputs = problem.network.get_submodule(last).out_features
    y = problem.train.y
    if problem.likelihood.task == "regression" and outputs != y.shape[-1]:
        raise OptionError(
            f"inference tdamp: the model has {outputs} outputs for {y.shape[-1]} regression "
            "target(s); allowed: one output a target"
        )


def outputs(
    problem: Problem, posterior: BernoulliGaussian, x: Tensor, predictive: str = "moments"
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the network's outputs ``[K, B, C]`` at `x` ``[K, B, ...]``.

    With ``predictive = "mean"`` the posterior means alone go through the network.
    """
    net = layers(problem, posterior, chain(problem))
    if predictive == "moments":
        *_, last = forward(net, x.flatten(2))
        return last.p, last.variance
    u = x.flatten(2)
    for depth, layer in enumerate(net):
        u = (u.relu() if depth else u) - layer.centre[:, None]
        u = u @ layer.moments()[0].mT
        if layer.bias is not None:
            u = u + layer.bias
    return u, torch.zeros_like(u)


def predict(
    inference: Tdamp,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
) -> Predictive:
    """Return class probabilities, or means and variances of targets.

    The means are those of training. Variances are those of a posterior that counts the data once:
    sweeps that count them again and again make the weights look more certain than they are.

    A Gaussian target is handed over as two draws, mean +- deviation: they have its moments.
    """
    q = own(join_personal(problem, posterior, memory, len(x)))
    q = q.once(first_variance(inference, problem))
    p, variance = outputs(problem, q, x, inference.predictive)
    noise = q.noise[:, None]
    if problem.likelihood.task == "classification":
        return Predictive(probit_probabilities(p, variance, noise)[:, None])
    deviation = variance.sqrt()
    return Predictive(torch.stack([p - deviation, p + deviation], 1), q.noise[0, 0])
