"""Training at random mixtures of two models (SuPerFed, eq. 3 and Algorithm 1).

`Objective.gradients` are those of eq. 3 as in the paper; `train` computes the same up to rounding,
with fewer passes over the parameters.
"""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import attrs

from bflcore.inference.gradient import Gradient, batches, mean_loss, steps
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Cohort, GradientInference, Layout, Problem
    from bflcore.inference.gradient import Optimiser
else:
    torch = lazy("torch")

__all__ = ["Objective", "cosine_gradients", "draw_lambdas", "train"]

COSINE = ((-2.0, 2.0), (2.0, -2.0))  # coefficients in the gradients of cos^2
FLOOR = 1e-30  # lower bound on squared norms, far below those of float32 networks


@attrs.frozen(slots=False)
class Objective:
    """The objective of a client (eq. 3) in w_f and w_l, with a new lambda per minibatch.

    NLL(W(lambda)) + mu prox(w_f, w_g) + nu cos(w_f, w_l)^2 + decay/2 (|w_f|^2 + |w_l|^2) with
    W(lambda) = (1 - lambda) w_f + lambda w_l. `prox` is ``squared`` (half the squared distance) or
    ``norm`` (the sum over tensors of distances); `mixing` is ``model`` (one lambda) or ``layer``
    (a lambda per layer).
    """

    layout: Layout
    mixing: str
    mu: float
    nu: float
    prox: str
    weight_decay: float

    @cached_property
    def layers(self) -> dict[str, slice]:
        """The slices of parameters with a common lambda."""
        if self.mixing == "model":
            return {"": slice(0, self.layout.total)}
        layers: dict[str, slice] = {}
        for name, at in self.layout.slices.items():
            layer = name.rpartition(".")[0]
            layers[layer] = slice(layers.get(layer, at).start, at.stop)
        return layers

    def gradients(self, w_f: Tensor, w_l: Tensor, w_g: Tensor, lam: Tensor, g: Tensor) -> Tensor:
        """Return the gradients for w_f and w_l ``[k, 2, P]``, given the loss's `g` at W(lambda).

        All arguments are ``[k, P]``.
        """
        mu, nu, decay = self.mu, self.nu, self.weight_decay
        cos_f, cos_l = cosine_gradients(w_f, w_l)
        d_f = (1 - lam) * g + mu * self.prox_gradient(w_f - w_g) + nu * cos_f + decay * w_f
        d_l = lam * g + nu * cos_l + decay * w_l
        return torch.stack([d_f, d_l], dim=1)

    def prox_gradient(self, shift: Tensor) -> Tensor:
        """Return the gradient of prox at `shift` = w_f - w_g ``[k, P]`` (0 at a shift of 0)."""
        if self.prox == "squared":
            return shift
        pieces = shift.split(self.layout.sizes, dim=1)
        return torch.cat([torch.nn.functional.normalize(piece, dim=1) for piece in pieces], dim=1)


def cosine_gradients(w_f: Tensor, w_l: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos(w_f, w_l)^2 for w_f and w_l ``[k, P]`` (0 if a norm is 0).

    d cos / d w_f = (u_l - cos u_f) / |w_f| with the unit vectors u.
    """
    norm_f, norm_l = (torch.linalg.vector_norm(w, dim=1, keepdim=True) for w in (w_f, w_l))
    norm_f, norm_l = norm_f.clamp_min(FLOOR**0.5), norm_l.clamp_min(FLOOR**0.5)
    u_f, u_l = w_f / norm_f, w_l / norm_l
    cos = torch.linalg.vecdot(u_f, u_l)[:, None]
    return 2 * cos * (u_l - cos * u_f) / norm_f, 2 * cos * (u_f - cos * u_l) / norm_l


def draw_lambdas(cohort: Cohort, taken: tuple[int, ...], layers: int, like: Tensor) -> Tensor:
    """Draw lambda ~ U(0, 1) ``[steps, K, layers]`` for every minibatch and layer of a round."""
    draws = [
        torch.rand(steps, layers, generator=generator, dtype=like.dtype, device=like.device)
        for steps, generator in zip(taken, cohort.streams("lambda"), strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(draws)


def train(
    inference: GradientInference,
    objective: Objective,
    problem: Problem,
    cohort: Cohort,
    server: Tensor,
    local: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return w_f and w_l ``[K, 2, P]`` after a round from w_g and w_l, and the loss ``[K]``.

    Each minibatch takes a step on `Objective.gradients` at a new lambda. These are linear in the
    rows w_f, w_l, g and w_g of one stack ``[K, 4, P]``, so one product C @ stack per layer, with C
    ``[2, 4]``, replaces a dozen passes over the parameters.
    """
    stack = torch.stack([server, local, torch.zeros_like(server), server], dim=1)
    mixture, loss = torch.empty_like(server), server.new_zeros(len(server))
    taken, layers = steps(inference, cohort), list(objective.layers.values())
    lambdas = draw_lambdas(cohort, taken, len(layers), server).transpose(1, 2)[..., None]
    descent = _Descent(inference, cohort, stack[:, :2])
    differentiate = Gradient(problem)
    push = objective.nu * local.new_tensor(COSINE)
    plan = zip(batches(inference, cohort), lambdas, _terms(objective, lambdas), strict=True)
    for k, group in groupby(plan, lambda step: len(step[0].sizes)):
        # Views are created once per group of steps with the same clients: on a CPU they cost time.
        known, mixed, buffer, total = stack[:k], mixture[:k], descent.buffer[:k], loss[:k]
        w, g = known[:, :2], known[:, 2]
        mixings = [(known[:, 0, at], known[:, 1, at], mixed[:, at]) for at in layers]
        products = [(buffer[..., at], known[..., at]) for at in layers]
        for batch, drawn, constant in group:
            lams, c = drawn[:, :k], constant[:, :k]
            for (federated, own, out), lam in zip(mixings, lams, strict=True):
                torch.lerp(federated, own, lam, out=out)  # W(lambda)
            total += differentiate(mixed, batch, out=g)[0]
            if objective.nu:
                c[..., :2].add_(_cosine_terms(w, push))
            for (into, rows), matrix in zip(products, c, strict=True):
                into.baddbmm_(matrix, rows, beta=descent.keeps)
            if objective.mu and objective.prox == "norm":
                pull = objective.prox_gradient(w[:, 0] - server[:k])
                buffer[:, 0].add_(pull, alpha=objective.mu)
            descent.step(w, buffer)
    return stack[:, :2].clone(), mean_loss(loss, taken)


class _Descent:
    """An in-place update of models ``[K, 2, P]``, from gradients that are added to `buffer`.

    For SGD the buffer is the momentum, multiplied by `keeps` before a gradient is added; for other
    rules it is the gradient. Clients that have taken all their steps are left out.
    """

    def __init__(self, inference: GradientInference, cohort: Cohort, models: Tensor) -> None:
        self.buffer, self.keeps = torch.zeros_like(models).contiguous(), 0.0
        self._lr = inference.lr_at(cohort.round)
        self._rule: Optimiser | None = None
        if inference.optimiser == "sgd":
            self.keeps = inference.momentum
        else:
            self._copy = models.contiguous().clone()  # fused rules need contiguous memory
            self._rule = inference.update_rule(self._copy, cohort)

    def step(self, models: Tensor, buffer: Tensor) -> None:
        """Take one step; `models` and `buffer` ``[k, 2, P]`` belong to the first k clients."""
        if self._rule is None:
            models.add_(buffer, alpha=-self._lr)
        else:
            self._rule.step(buffer)
            models.copy_(self._copy[: len(models)])


def _terms(objective: Objective, lambdas: Tensor) -> Tensor:
    """Return C ``[..., 2, 4]`` for lambdas ``[..., 1]``, without the cosine terms.

    dL/dw_f = (1 - lambda) g + mu (w_f - w_g) + decay w_f; dL/dw_l = lambda g + decay w_l.
    """
    decay, pull = objective.weight_decay, objective.mu if objective.prox == "squared" else 0.0
    c = lambdas.new_zeros(*lambdas.shape[:-1], 2, 4)
    c[..., 0, 0], c[..., 1, 1] = decay + pull, decay
    c[..., 0, 2], c[..., 1, 2] = 1 - lambdas[..., 0], lambdas[..., 0]
    c[..., 0, 3] = -pull
    return c


def _cosine_terms(models: Tensor, push: Tensor) -> Tensor:
    """Return M ``[k, 2, 2]`` such that M @ models is nu times the gradients of cos(w_f, w_l)^2.

    The gradient for w_f is 2 cos^2 (w_l / w_f.w_l - w_f / |w_f|^2), for w_l accordingly: M is
    `push` (nu times `COSINE`) times cos^2, divided by the Gram matrix, and 0 if a norm is 0.
    """
    gram = torch.bmm(models, models.mT)
    safe = gram + FLOOR
    cosines = gram[:, :1, 1] / safe.diagonal(dim1=1, dim2=2)  # their product is cos^2
    return cosines.prod(1)[:, None, None] * push / safe
