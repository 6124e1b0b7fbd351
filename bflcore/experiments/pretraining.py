"""Pre-training: learn the first round's start and prior from some of the data, pooled.

The run's own inference fits one pseudo client that holds a random fraction of all training
samples. Its posterior over the shared parameters becomes both start and prior of the first round:
it holds what the clients have in common, so an aggregator that counts common knowledge once
(`subtracts-prior`) subtracts this posterior, and the KL term pulls towards it. Under ``--hyper
fixed`` it remains the prior. Personal parameters keep their initial values, and nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from bflcore.engines.client import ClientWorker
from bflcore.engines.screening import screen
from bflcore.errors import ClientError, RunError
from bflcore.problem.base import Shares
from bflcore.randomness import SERVER, stream
from bflcore.rounds import Recipe

if TYPE_CHECKING:
    from bflcore.messages import Broadcast
    from bflcore.problem.base import Problem

__all__ = ["pool_samples", "pretrain"]


def pool_samples(problem: Problem, fraction: float) -> Problem:
    """Return the problem of one client that holds `fraction` of all training samples, or one."""
    parts = [problem.train.of(client) for client in problem.clients]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = torch.randperm(len(x), generator=stream(problem.seed, SERVER, SERVER, "pre-training"))
    chosen = order[: max(1, round(fraction * len(x)))]
    share = Shares(x[chosen], y[chosen], (0,), (len(chosen),))  # standardised, if need be
    return attrs.evolve(problem, train=share, clients=(SERVER,), novel=(), standardise=False)


def pretrain(
    recipe: Recipe, problem: Problem, broadcast: Broadcast, fraction: float
) -> tuple[Broadcast, float]:
    """Return the first broadcast as learned from the pooled samples, and the training loss.

    See `HyperUpdate.after_pretraining`. Raises `RunError` when the inference fails on the pooled
    samples.
    """
    pool, inference = pool_samples(problem, fraction), recipe.inference
    # The pseudo client has the server's number, so that it shares no random draws with a client.
    worker = ClientWorker(pool, inference, bins=0)  # it evaluates nothing
    (reply,) = worker.fit(broadcast, [SERVER], [inference.initial_memory(pool)])
    (result,) = screen(reply, broadcast)
    if isinstance(result, ClientError):
        raise RunError(
            f"--pretrain: inference {inference.name} gave no valid result on the "
            f"{pool.train.size(SERVER)} pooled samples: {result.reason}"
        )
    following = recipe.hyper.after_pretraining(broadcast, result.posterior[0])
    return broadcast.followed_by(following), float(result.loss[0])
