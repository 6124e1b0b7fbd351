"""Prediction from the segment: which lambda, and what each lambda predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bfl_superfed import subspace
from bflcore.inference.memory import join_personal

if TYPE_CHECKING:
    from bfl_superfed.plugin import LowLossSubspace
    from bflcore import Broadcast, Cohort, Posterior, Predictive, Problem

__all__ = ["GRID", "along_the_segment", "choose", "ends", "losses", "personalise", "predict"]

LAMBDA = "lambda"  # in a client's memory, while it predicts: the lambda it chose
GRID = tuple(step / 10 for step in range(11))  # the paper's: 0, 0.1, ..., 1
# Equally likely lambdas. Under the density 2 (1 - lambda), of mean 1/3: the quantiles
# (i + 1/2) / 11 of its distribution function 1 - (1 - lambda)^2.
EXPECTED = 1 / 3
PRIORS = {
    "uniform": GRID,
    "falling": tuple(1 - (1 - (i + 0.5) / 11) ** 0.5 for i in range(11)),
}


def ends(
    problem: Problem, posterior: Posterior, memory: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return w_f and w_l ``[K, P]``; a client without a local model has w_f twice."""
    clients = len(memory[subspace.STARTED])
    federated = join_personal(problem, posterior, memory, clients).mean
    started = memory[subspace.STARTED][:, None] > 0
    return federated, torch.where(started, memory[subspace.LOCAL], federated)


def predict(
    inference: LowLossSubspace,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
) -> Predictive:
    """Predict with each client's lambda (S = 1), or with all lambdas of the prior (S = 11)."""
    federated, local = ends(problem, posterior, memory)
    if inference.lambda_selection == "ensemble":
        lambdas = federated.new_tensor(PRIORS[inference.ensemble_prior]).expand(len(x), -1)
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
        server = join_personal(problem, broadcast.start, memory, clients).mean
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
    """Return each client's lambda ``[K]``, from its held-out samples."""
    federated, local = ends(problem, broadcast.start, memory)
    chosen = federated.new_full((len(federated),), inference.fixed_lambda)
    for row, held in enumerate(subspace.hold_out(inference, problem, cohort)[1]):
        if len(held):
            x, y = cohort.x[row, held.to(cohort.x.device)], cohort.y[row, held.to(cohort.y.device)]
            mixtures = (torch.lerp(federated[row], local[row], at) for at in GRID)
            chosen[row] = choose(torch.stack([losses(problem, w, x, y) for w in mixtures]))
    return chosen


def choose(losses: Tensor) -> float:
    """Return a lambda of the grid from the losses ``[11, V]`` of held-out samples.

    Of all that are within one standard error of the best (the paired difference's), the nearest
    to `EXPECTED`: a few samples seldom tell neighbours on the segment apart.
    """
    excess = losses - losses[losses.mean(1).argmin()]
    error = excess.std(1, correction=0) / len(excess[0]) ** 0.5
    alike = (excess.mean(1) <= error).tolist()
    return min(
        (at for at, is_alike in zip(GRID, alike, strict=True) if is_alike),
        key=lambda at: abs(at - EXPECTED),
    )


def losses(problem: Problem, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return 1 - p(y | x) of each sample ``[V]``, or for a regression -log p(y | x).

    Held-out labels may be wrong, and a wrong label costs a confident model up to infinity in log
    likelihood. 1 - p(y | x) sums to a constant over labels; such a loss ranks models alike with
    and without symmetric noise (Ghosh, Kumar & Sastry 2017, theorem 1).
    """
    with torch.no_grad():
        nll = problem.likelihood.nll(problem.forward(weights[None], x[None])[0], y)
    return -torch.expm1(-nll) if problem.likelihood.task == "classification" else nll
