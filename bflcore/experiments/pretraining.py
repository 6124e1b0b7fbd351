"""Pre-training: what clients start from is learned from some of their data, pooled, before round 1.

A random fraction of all training samples makes one pseudo client, which the run's own inference
fits. Its posterior over the shared coordinates becomes start *and* prior of the first round:
it holds what the clients have in common, so a rule that counts common knowledge once
(`subtracts-prior`) subtracts this posterior, and the KL term pulls towards it. Under ``--hyper
fixed`` it stays the prior. Personal coordinates stay as initialised, and nothing travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from bflcore.engines.client import fit_clients
from bflcore.engines.screening import screen
from bflcore.errors import ClientError, RunError
from bflcore.problem.base import Shares
from bflcore.randomness import SERVER, stream
from bflcore.rounds import Recipe

if TYPE_CHECKING:
    from bflcore.messages import Broadcast
    from bflcore.problem.base import Problem

__all__ = ["pooled", "pretrain"]


def pooled(problem: Problem, fraction: float) -> Problem:
    """Return the problem of one client that holds `fraction` of all training samples, or one."""
    parts = [problem.train.of(client) for client in problem.clients]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = torch.randperm(len(x), generator=stream(problem.seed, SERVER, SERVER, "pre-training"))
    chosen = order[: max(1, round(fraction * len(x)))]
    share = Shares(x[chosen], y[chosen], (0,), (len(chosen),))
    return attrs.evolve(problem, train=share, clients=(SERVER,), novel=())


def pretrain(
    recipe: Recipe, problem: Problem, broadcast: Broadcast, fraction: float
) -> tuple[Broadcast, float]:
    """Return the first broadcast with what the pooled samples taught, and the training loss.

    See `HyperUpdate.after_pretraining`. Raises `RunError` when the inference fails on the pooled
    samples.
    """
    pool, inference = pooled(problem, fraction), recipe.inference
    # Fitted as the server's own client, whose draws are nobody else's; the only share is the last.
    (reply,) = fit_clients(pool, inference, broadcast, [SERVER], [inference.remember(pool)])
    (result,) = screen(reply, broadcast)
    if isinstance(result, ClientError):
        raise RunError(
            f"--pretrain: inference {inference.name} gave no valid result on the "
            f"{pool.train.size(SERVER)} pooled samples: {result.reason}"
        )
    following = recipe.hyper.after_pretraining(broadcast, result.posterior[0])
    return following, float(result.loss[0])
