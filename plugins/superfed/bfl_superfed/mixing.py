"""Training at random mixtures: both gradients of eq. 3 from one backward pass and one product.

A cohort's vectors are one stack ``[K, 4, P]`` with rows w_f, w_l, the slope of the loss at
W(lambda), and w_g. Both gradients are linear in them: C @ stack with C ``[2, 4]``.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bflcore.inference.gradient import Gradient, Optimiser, batches, mean_loss, steps

if TYPE_CHECKING:
    from bfl_superfed.plugin import LowLossSubspace
    from bflcore import Broadcast, Cohort, Problem

__all__ = ["cosine_terms", "directions", "draw", "layers", "terms", "train"]

COSINE = ((-2.0, 2.0), (2.0, -2.0))  # signs and factor of the gradient of cos^2
FLOOR = 1e-30  # of a squared norm; far below any that float32 weights of a network have


def train(
    inference: LowLossSubspace,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    server: Tensor,
    local: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return w_f and w_l ``[K, 2, P]`` after a round, and the mean loss ``[K]``."""
    stack = torch.stack([server, local, torch.zeros_like(server), server], dim=1)
    mixture, loss = torch.empty_like(server), server.new_zeros(len(server))
    taken = steps(inference, cohort)
    slices = layers(inference, problem)
    lambdas = draw(cohort, taken, len(slices), like=server)
    descent = Descent(inference, stack[:, :2], taken, broadcast.round)
    differentiate = Gradient(problem)
    push = inference.nu * local.new_tensor(COSINE)
    plan = zip(batches(inference, cohort), lambdas, terms(inference, lambdas), strict=True)
    for k, group in groupby(plan, lambda step: len(step[0].sizes)):
        # Made once for all steps that the same clients take: on a CPU, views cost time.
        known, mixed, buffer, total = stack[:k], mixture[:k], descent.buffer[:k], loss[:k]
        w, slope = known[:, :2], known[:, 2]
        mixings = [(known[:, 0, at], known[:, 1, at], mixed[:, at]) for at in slices]
        products = [(buffer[..., at], known[..., at]) for at in slices]
        for batch, drawn, constant in group:
            lams, c = drawn[:, :k], constant[:, :k]
            for (federated, own, out), lam in zip(mixings, lams, strict=True):
                torch.lerp(federated, own, lam, out=out)
            total += differentiate(mixed, batch, out=slope)[0]
            if inference.nu:
                c[..., :2].add_(cosine_terms(w, push))
            for (into, rows), matrix in zip(products, c, strict=True):
                into.baddbmm_(matrix, rows, beta=descent.keeps)
            if inference.mu and inference.prox == "norm":
                shift = w[:, 0] - server[:k]
                buffer[:, 0].add_(directions(problem, shift), alpha=inference.mu)
            descent.step(w, buffer)
    return stack[:, :2].clone(), mean_loss(loss, taken)


class Descent:
    """The update of `models` ``[K, 2, P]`` in place from a buffer ``[K, 2, P]``.

    For SGD the buffer is its momentum, which keeps a part of itself when the gradient is added;
    for the other rules it is the gradient. A client that has taken its steps is left out.
    """

    def __init__(
        self, inference: LowLossSubspace, models: Tensor, taken: tuple[int, ...], round: int
    ) -> None:
        self._lr = inference.lr_at(round)
        self._rule: Optimiser | None = None
        self.buffer, self.keeps = torch.zeros_like(models).contiguous(), inference.momentum
        if inference.optimiser != "sgd":
            self._copy = models.contiguous().clone()  # fused rules need contiguous memory
            self._rule = Optimiser(inference, self._copy, taken, round)
            self.keeps = 0.0

    def step(self, models: Tensor, buffer: Tensor) -> None:
        """Take one step: `models` and `buffer` ``[k, 2, P]`` are the first k clients'."""
        if self._rule is None:
            models.add_(buffer, alpha=-self._lr)
        else:
            self._rule.step(buffer)
            models.copy_(self._copy[: len(models)])


def layers(inference: LowLossSubspace, problem: Problem) -> list[slice]:
    """Return the coordinates that share a lambda: all of them, or a layer's, in order."""
    if inference.mixing == "model":
        return [slice(0, problem.layout.total)]
    ends: dict[str, int] = {}
    end = 0
    for name, size in zip(problem.layout.names, problem.layout.sizes, strict=True):
        end += size
        ends[name.rpartition(".")[0]] = end
    starts = [0, *ends.values()]
    return [slice(*pair) for pair in zip(starts, ends.values(), strict=False)]


def draw(cohort: Cohort, taken: tuple[int, ...], count: int, like: Tensor) -> Tensor:
    """Draw lambda ~ U(0, 1) ``[steps, count, K, 1]`` for every minibatch and layer of a round."""
    draws = [
        torch.rand(steps, count, generator=generator, dtype=like.dtype, device=like.device)
        for steps, generator in zip(taken, cohort.streams("lambda"), strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(draws).transpose(1, 2)[..., None]


def terms(inference: LowLossSubspace, lambdas: Tensor) -> Tensor:
    """Return C ``[..., 2, 4]`` for lambdas ``[..., 1]``, without the cosine's terms.

    dL/dw_f = (1 - lambda) slope + mu (w_f - w_g) + decay w_f; dL/dw_l = lambda slope + decay w_l.
    """
    pull = inference.mu if inference.prox == "squared" else 0.0
    c = lambdas.new_zeros(*lambdas.shape[:-1], 2, 4)
    c[..., 0, 0], c[..., 1, 1] = inference.weight_decay + pull, inference.weight_decay
    c[..., 0, 2], c[..., 1, 2] = 1 - lambdas[..., 0], lambdas[..., 0]
    c[..., 0, 3] = -pull
    return c


def cosine_terms(models: Tensor, push: Tensor) -> Tensor:
    """Return M ``[k, 2, 2]`` such that M @ models is nu times the gradient of cos(w_f, w_l)^2.

    In w_f that gradient is 2 cos^2 (w_l / w_f.w_l - w_f / |w_f|^2), and alike in w_l: M is
    `push`, nu times `COSINE`, times cos^2 over the Gram matrix. Where a norm is 0, so is M
    (subgradient 0).
    """
    gram = torch.bmm(models, models.mT)
    safe = gram + FLOOR
    cosines = gram[:, :1, 1] / safe.diagonal(dim1=1, dim2=2)  # their product is cos^2
    return cosines.prod(1)[:, None, None] * push / safe


def directions(problem: Problem, shift: Tensor) -> Tensor:
    """Return the gradient of the sum over tensors of |w_f - w_g| ``[k, P]``; 0 where they agree."""
    pieces = shift.split(problem.layout.sizes, dim=1)
    return torch.cat([torch.nn.functional.normalize(piece, dim=1) for piece in pieces], dim=1)
