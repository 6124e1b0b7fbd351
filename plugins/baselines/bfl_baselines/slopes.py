"""Slopes: what sets the methods apart that train by FedAvg's own loop, `fit_points`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import torch

from bflcore.inference.gradient import Optimiser, steps
from bflcore.inference.memory import PERSONAL, STARTED, client_posterior, join_personal, keep_own
from bflcore.inference.point import descend, fit_points, objective
from bflcore.posteriors import Point

if TYPE_CHECKING:
    from torch import Tensor

    from bfl_baselines import inferences as kinds
    from bflcore import Broadcast, Cohort, LocalResult, PointInference, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient

CONTROL = "control"  # its name in memory, in statistics and at the server; ``[P_shared]``


Kind = TypeVar("Kind", bound="PointInference")


def replace(inference: Kind, **options: object) -> Kind:
    """Return the inference with other options."""
    return cast("Kind", attrs.evolve(cast("Any", inference), **options))


def fine_tuned(
    inference: PointInference, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> dict[str, Tensor]:
    """Return memories with networks ``[K, P]`` trained further on each client's samples."""
    start = join_personal(problem, broadcast.start, cohort.memory, len(cohort.clients)).mean
    slope = objective(inference, problem, cohort, start)
    w, _ = descend(inference, problem, cohort, start, broadcast.round, slope)
    return keep_own(cohort.memory, Point(w))


def ditto(
    inference: kinds.Ditto, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Train w as FedAvg, and v on f(v) + lambda/2 ||v - w_g||^2."""
    shared = fit_points(inference, problem, broadcast, cohort)
    clients = len(cohort.clients)
    server = join_personal(problem, broadcast.start, cohort.memory, clients).mean
    v = client_posterior(problem, broadcast.start, cohort.memory, clients).mean
    pulled = replace(inference, anchor=inference.anchor + inference.pull)
    slope = objective(pulled, problem, cohort, server)
    v, _ = descend(inference, problem, cohort, v, broadcast.round, slope)
    return attrs.evolve(shared, memory=keep_own(shared.memory, Point(v)))


def apfl(
    inference: kinds.AdaptiveMixture, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Train w on itself and v on alpha v + (1 - alpha) w; alpha descends once a round (eq. 10)."""
    clients, lr = len(cohort.clients), inference.lr_at(broadcast.round)
    server = join_personal(problem, broadcast.start, cohort.memory, clients).mean
    started = cohort.memory[STARTED][:, None] > 0
    v = torch.where(started, cohort.memory["v"], server)
    alpha = cohort.memory["alpha"][:, None].clone()  # [K, 1]
    pace = Optimiser(inference, v, steps(inference, cohort), broadcast.round)
    adapts = inference.adaptive

    def slope(plain: LossAndGradient, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        nonlocal adapts
        k = len(w)
        _, gradient = plain(w.lerp(v[:k], alpha[:k]), batch)
        if adapts:
            product = ((v[:k] - w) * gradient).sum(1, keepdim=True)
            alpha[:k] = (alpha[:k] - lr * product).clamp(0, 1)
            adapts = False
        pace.step(alpha[:k] * gradient)  # d mix / d v = alpha
        return plain(w, batch)

    shared = fit_points(inference, problem, broadcast, cohort, transform=slope)
    own = Point.unpack(shared.memory, PERSONAL)
    w = shared.posterior.join(own, problem.layout).mean
    memory = {**keep_own(shared.memory, Point(w.lerp(v, alpha))), "v": v, "alpha": alpha[:, 0]}
    return attrs.evolve(shared, memory=memory)


def pfedme(
    inference: kinds.MoreauEnvelope, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Descend lambda (w - theta), theta minimising f(theta) + lambda/2 ||theta - w||^2."""
    clients = len(cohort.clients)
    own = client_posterior(problem, broadcast.start, cohort.memory, clients).mean.clone()

    def slope(plain: LossAndGradient, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        theta, losses = w.clone(), w.new_zeros(len(w))
        for _ in range(inference.inner_steps):
            losses, gradient = plain(theta, batch)
            gradient = gradient.add(theta - w, alpha=inference.pull)
            theta = theta.sub(gradient, alpha=inference.personal_lr)
        own[: len(w)] = theta
        return losses, inference.pull * (w - theta)

    shared = fit_points(inference, problem, broadcast, cohort, transform=slope)
    return attrs.evolve(shared, memory=keep_own(shared.memory, Point(own)))


def per_fedavg(
    inference: kinds.MetaLearning, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Follow g(w - a g(w; B1); B2), B1 and B2 the halves of a minibatch."""

    def slope(plain: LossAndGradient, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        first, second = halves(batch)
        _, gradient = plain(w, first)
        return plain(w.sub(gradient, alpha=inference.inner_lr), second)

    return fit_points(inference, problem, broadcast, cohort, transform=slope)


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Divide each client's samples by weights; of an odd number the middle one is in both."""
    sizes = torch.tensor(batch.sizes, device=batch.x.device)[:, None]
    row = torch.arange(batch.y.shape[1], device=batch.x.device)
    first, second = row < (sizes + 1) // 2, (row >= sizes // 2) & (row < sizes)
    one, two = (half.to(batch.x.dtype) / half.sum(1, keepdim=True) for half in (first, second))
    return attrs.evolve(batch, weight=one), attrs.evolve(batch, weight=two)


def scaffold(
    inference: kinds.ControlVariates, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Train with g + c - c_i; then c_i+ = c_i - c + (x - y_i) / (steps lr) (option II).

    A client sends (c_i+ - c_i) / N, so that the server's sum is the paper's step, c += (S/N) mean.
    """
    layout, mine = problem.layout, cohort.memory[CONTROL]
    control = broadcast.hyper.get(CONTROL, torch.zeros_like(mine[0]))
    correction = layout.join(control - mine, mine.new_zeros(len(mine), layout.personal_total))

    def slope(plain: LossAndGradient, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        nll, gradient = plain(w, batch)
        return nll, gradient + correction[: len(w)]

    result = fit_points(inference, problem, broadcast, cohort, transform=slope)
    taken = mine.new_tensor(steps(inference, cohort))[:, None]
    moved = broadcast.start.mean - result.posterior.mean
    drift = moved / (taken.clamp_min(1) * inference.lr_at(broadcast.round))
    change = torch.where(taken > 0, drift - control, torch.zeros_like(drift))
    statistics = {CONTROL: change / len(problem.clients)}
    memory = {**result.memory, CONTROL: mine + change}
    return attrs.evolve(result, statistics=statistics, memory=memory)
