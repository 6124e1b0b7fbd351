"""Prediction from the segment: which lambda, and what each lambda predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bfl_superfed import subspace
from bflcore import training

if TYPE_CHECKING:
    from bfl_superfed.plugin import LowLossSubspace
    from bflcore import Broadcast, Cohort, Posterior, Predictive, Problem

__all__ = ["GRID", "along_the_segment", "ends", "personalise", "predict"]

LAMBDA = "lambda"  # in a client's memory, while it predicts: the lambda it chose
GRID = tuple(step / 10 for step in range(11))  # the paper's: 0, 0.1, ..., 1


def ends(
    problem: Problem, posterior: Posterior, memory: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return w_f and w_l ``[K, P]``; a client without a local model has w_f twice."""
    clients = len(memory[subspace.STARTED])
    federated = training.joined(problem, posterior, memory, clients).mean
    started = memory[subspace.STARTED][:, None] > 0
    return federated, torch.where(started, memory[subspace.LOCAL], federated)


def predict(
    inference: LowLossSubspace,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
) -> Predictive:
    """Predict with each client's lambda (S = 1), or with all of the grid (S = 11)."""
    federated, local = ends(problem, posterior, memory)
    if inference.lambda_selection == "ensemble":
        lambdas = federated.new_tensor(GRID).expand(len(x), -1)
    else:
        fixed = federated.new_full((len(x),), inference.fixed_lambda)
        lambdas = memory.get(LAMBDA, fixed)[:, None]
    draws = torch.lerp(federated[:, None], local[:, None], lambdas[:, :, None])
    return problem.likelihood.predictive(problem.outputs(draws, x))


def along_the_segment(
    problem: Problem, posterior: Posterior, memory: Mapping[str, Tensor], x: Tensor
) -> dict[float, Predictive]:
    """Return the prediction of every lambda of the grid."""
    federated, local = ends(problem, posterior, memory)
    found = {}
    for value in GRID:
        outputs = problem.outputs(torch.lerp(federated, local, value)[:, None], x)
        found[value] = problem.likelihood.predictive(outputs)
    return found


def personalise(
    inference: LowLossSubspace,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    novel: bool,
) -> Mapping[str, Tensor]:
    """Return the memory with each client's lambda; novel clients first adapt from w_g."""
    memory = cohort.memory
    if novel:
        clients = len(cohort.clients)
        server = training.joined(problem, broadcast.start, memory, clients).mean
        started = torch.ones_like(memory[subspace.STARTED])
        begun = {**memory, subspace.LOCAL: server.clone(), subspace.STARTED: started}
        memory = subspace.fit(
            inference, problem, broadcast, attrs.evolve(cohort, memory=begun)
        ).memory
    if inference.lambda_selection != "validation":
        return memory
    return {**memory, LAMBDA: _validated(inference, problem, broadcast, cohort, memory)}


def _validated(
    inference: LowLossSubspace,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    memory: Mapping[str, Tensor],
) -> Tensor:
    """Return the lambda ``[K]`` of least loss on each client's held-out samples."""
    federated, local = ends(problem, broadcast.start, memory)
    chosen = federated.new_full((len(federated),), inference.fixed_lambda)
    for row, held in enumerate(subspace.hold_out(inference, problem, cohort)[1]):
        if len(held):
            x, y = cohort.x[row, held.to(cohort.x.device)], cohort.y[row, held.to(cohort.y.device)]
            losses = [_loss(problem, federated[row].lerp(local[row], at), x, y) for at in GRID]
            chosen[row] = GRID[int(torch.stack(losses).argmin())]
    return chosen


def _loss(problem: Problem, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return problem.likelihood.nll(problem.forward(weights[None], x[None])[0], y).mean()
