"""Module A and B of TDAMP and the prior's update, for a whole cohort (Xu et al. 2024, section IV).

One minibatch: moments forward, messages backward, every layer's weights updated by the messages,
the posterior of one minibatch becoming the prior of the next (PasP). Messages are not kept from
one minibatch to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from bfl_tdamp.channels import Output, gaussian_output, probit_output, relu_backward
from bfl_tdamp.network import Layer, Pass, chain, forward, layers
from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian, groups
from bflcore.inference.gradient import batches, steps
from bflcore.inference.memory import join_personal, local_result
from bflcore.randomness import SERVER, stream

if TYPE_CHECKING:
    from bfl_tdamp.plugin import Tdamp
    from bflcore import Broadcast, Cohort, LocalResult, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.posteriors import Posterior

__all__ = ["first_variance", "fit", "initial", "own"]

VELOCITY = "velocity"  # in a client's memory: the means' last move
TINY = 1e-30  # keeps 0 / 0 a zero
LAST = 0.1  # scale of the last layer's first means: outputs start near zero, symmetry is broken
CENTRE_SAMPLES = 2048  # training samples whose mean activations the layers are centred at


def initial(inference: Tdamp, problem: Problem) -> BernoulliGaussian:
    """Return slabs N(N(0, c/n), v_0/n) with c = 1 in the first layer and 2 after a rectifier.

    n is the number of inputs; biases start at N(0, v_0). Layers are centred at the mean
    activations of a network with these means, over training samples of all clients.
    """
    draws = stream(problem.seed, SERVER, SERVER, "tdamp", problem.device)
    layout, columns = problem.layout, groups(problem.layout)
    mean = torch.zeros_like(problem.initial)
    order = chain(problem)
    for depth, path in enumerate(order):
        name = f"{path}.weight".lstrip(".")
        part, shape = layout.slices[name], layout.shapes[layout.names.index(name)]
        scale = ((1 if depth == 0 else 2) / shape[1]) ** 0.5
        size = shape[0] * shape[1]
        scale *= LAST if depth == len(order) - 1 else 1
        mean[part] = scale * torch.randn(size, generator=draws, device=mean.device).to(mean.dtype)
    log_odds = mean.new_full((columns.total,), float(torch.logit(torch.tensor(inference.rho))))
    q = BernoulliGaussian.of(
        layout,
        mean,
        first_variance(inference, problem),
        log_odds.clamp(-CERTAIN, CERTAIN),
        torch.zeros_like(log_odds),
        inference.noise,
    )
    if inference.centred:
        _centre(problem, q.map(lambda t: t[None]), order)
    return q


def first_variance(inference: Tdamp, problem: Problem) -> Tensor:
    """Return the slabs' variance ``[P]`` before any data: v_0, for weights over their inputs."""
    classifies = problem.likelihood.task == "classification"
    v_0 = inference.variance or (10.0 if classifies else 0.5)
    layout, variance = problem.layout, torch.full_like(problem.initial, v_0)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if len(shape) == 2:
            variance[layout.slices[name]] /= shape[1]
    return variance


def _centre(problem: Problem, q: BernoulliGaussian, order: list[str]) -> None:
    """Set the centres, in place, to the mean activations."""
    x = problem.train.x[: problem.train.end[max(problem.clients)]]  # novel clients come last
    u = x[:: -(-len(x) // CENTRE_SAMPLES)].flatten(1)
    for layer in layers(problem, q, order):
        layer.centre[0] = u.mean(0)
        u = ((u - layer.centre) @ layer.mean[0].T).relu()


def fit(inference: Tdamp, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
    """Infer every client's posterior from the start, sweep by sweep over its minibatches."""
    clients = len(cohort.clients)
    q = own(join_personal(problem, broadcast.start, cohort.memory, clients)).map(torch.clone)
    prior = own(join_personal(problem, broadcast.prior, cohort.memory, clients))
    moving = attrs.evolve(q, slab_mean=cohort.memory[VELOCITY].clone())
    order = chain(problem)
    net, anchor, momentum = (layers(problem, one, order) for one in (q, prior, moving))
    sweep = [max(1, -(-size // inference.batch_size)) for size in cohort.sizes]
    done_before = broadcast.round * inference.local_epochs
    observe = probit_output if problem.likelihood.task == "classification" else gaussian_output
    copies = _copies(inference, problem, cohort).to(q.noise)
    loss, residuals = q.noise.new_zeros(clients), Residuals(inference, cohort, q.noise[:, 0])
    for step, batch in enumerate(batches(inference, cohort), 1):
        k = len(batch.sizes)
        active = [[layer.rows(k) for layer in one] for one in (net, anchor, momentum)]
        passes = list(forward(active[0], batch.x.flatten(2)))
        output = observe(passes[-1].p, passes[-1].variance, batch.y, q.noise[:k, None])
        messages = _messages(passes, output, batch, copies[:k])
        changes = [
            _change(layer, done, *message)
            for layer, done, message in zip(active[0], passes, messages, strict=True)
        ]
        pace = _pace(passes, changes, *messages[-1])
        for layer, drift, change in zip(active[0], active[2], changes, strict=True):
            _apply(layer, drift, change, pace, inference.momentum)
        ended = [divmod(step, minibatches) for minibatches in sweep[:k]]
        if not all(rest for _, rest in ended):
            keeps = [1.0 if rest else inference.keeps(done_before + n - 1) for n, rest in ended]
            share = q.noise.new_tensor(keeps)[:, None]
            q.counted[:k] += q.noise.new_tensor([not rest for _, rest in ended])[:, None]
            q.counted[:k] *= share
            for layer, first in zip(active[0], active[1], strict=True):
                _forget(layer, first, share[..., None])
        nll = output.nll
        loss[:k] += nll.mean(1) if batch.weight is None else (nll * batch.weight).sum(1)
        residuals.add(output, batch)
    taken = torch.tensor(steps(inference, cohort), device=loss.device)
    found = local_result(problem, cohort, q, loss / taken.clamp_min(1), residuals.means())
    return attrs.evolve(found, memory={**found.memory, VELOCITY: moving.slab_mean})


def own(posterior: Posterior) -> BernoulliGaussian:
    """Return the posterior as what the registry has made sure of."""
    assert isinstance(posterior, BernoulliGaussian)  # noqa: S101 - the registry admits no other
    return posterior


def _copies(inference: Tdamp, problem: Problem, cohort: Cohort) -> Tensor:
    """Return how often a client counts each of its samples ``[K, 1, 1]``: n / n_k.

    The geometric mean takes client k's evidence to the power n_k / n. With prior p and likelihoods
    l_k, prod_k (p l_k^(n / n_k))^(n_k / n) = p prod_k l_k: a sweep counts everybody's data once.
    """
    total = sum(map(problem.train.size, problem.clients)) if inference.pooled else 0
    copies = [total / size if total and size else 1.0 for size in cohort.sizes]
    return torch.tensor(copies)[:, None, None]


def _messages(
    passes: list[Pass], output: Output, batch: Batch, copies: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return S and U of every layer's pre-activations, from the outputs back to the inputs.

    Every sample's are taken `copies` ``[k, 1, 1]`` times.
    """
    real = None if batch.weight is None else (batch.weight > 0).to(output.s.dtype)[..., None]
    s, u = output.s, output.u
    found = []
    for depth in reversed(range(len(passes))):
        if real is not None:
            s, u = s * real, u * real  # padding has nothing to say
        found.append((s * copies, u * copies))
        if depth:
            w, z = passes[depth].weights, passes[depth - 1].rectified
            assert z is not None  # noqa: S101 - every layer but the last is rectified
            precision, gradient = u @ w.square(), s @ w
            s, u = relu_backward(z, z.mean * precision + gradient, precision)
    return found[::-1]


@attrs.define(eq=False)
class Change:
    """What the messages make of a layer's slabs, and how far each row may go that way.

    `mean` ``[k, M, N]`` is mu+ - mu and `variance` v+; `moved` ``[k, B, M]`` is what the change
    does to the pre-activations, `cost` ``[k, M]`` what the prior charges for it; both already
    scaled by `pace` ``[k, M]``.
    """

    mean: Tensor
    variance: Tensor
    bias: Tensor | None
    bias_variance: Tensor | None
    pace: Tensor
    moved: Tensor
    cost: Tensor


def _change(layer: Layer, done: Pass, s: Tensor, u: Tensor) -> Change:
    """Multiply a layer's prior by its messages; pace every row.

    A row's pace maximises the local quadratic along its change: it replaces damping by hand.
    Passes over ``[k, M, N]`` are what a minibatch costs besides its products: they are in place.
    """
    lam, mean = u.mT @ done.squares, s.mT @ done.inputs  # [k, M, N]
    if not layer.kept:  # the messages are expanded around the effective weights
        mean.addcmul_(done.weights - layer.mean, lam)
    variance = torch.div(layer.variance, lam.mul_(layer.variance).add_(1), out=lam)
    mean.mul_(variance)
    effect = mean if layer.kept else layer.log_odds.sigmoid()[:, None] * mean
    moved = done.inputs @ effect.mT  # [k, B, M]
    cost = torch.square(mean).div_(layer.variance).sum(-1)  # [k, M]
    bias = bias_variance = None
    if layer.bias is not None and layer.bias_variance is not None:
        lam_b, g_b = u.sum(1, keepdim=True), s.sum(1, keepdim=True)
        bias_variance = layer.bias_variance / (1 + layer.bias_variance * lam_b)
        bias = bias_variance * g_b
        moved += bias
        cost += (bias.square() / layer.bias_variance)[:, 0]
    pace = _best((s * moved).sum(1), cost + (moved.square() * u).sum(1))
    return Change(
        mean, variance, bias, bias_variance, pace, moved * pace[:, None], cost * pace.square()
    )


def _pace(passes: list[Pass], changes: list[Change], s: Tensor, u: Tensor) -> Tensor:
    """Return the pace ``[k]`` of all layers together: rows move at once, and may overshoot.

    The changes are propagated to the outputs, where `s` and `u` are the local quadratic.
    """
    moved = changes[0].moved
    for done, before, change in zip(passes[1:], passes, changes[1:], strict=False):
        z = before.rectified
        assert z is not None  # noqa: S101 - every layer but the last is rectified
        moved = change.moved + (moved * (1 - z.below.cdf)) @ done.weights.mT
    cost = sum(change.cost.sum(1) for change in changes)
    return _best((moved * s).sum((1, 2)), cost + (moved.square() * u).sum((1, 2)))


def _best(gain: Tensor, cost: Tensor) -> Tensor:
    """Return the maximiser over [0, 1] of gain t - cost t^2 / 2."""
    return (gain / cost.clamp_min(TINY)).clamp(0, 1)


def _apply(layer: Layer, drift: Layer, change: Change, pace: Tensor, momentum: float) -> None:
    """Make the posterior of this minibatch the prior of the next, in place (PasP, eq. 27)."""
    if not layer.decided:
        _decide(layer, layer.mean + change.mean, change.variance)
    paces = (pace[:, None] * change.pace)[..., None]  # [k, M, 1]
    _move(layer.mean, drift.mean, change.mean, paces, momentum)
    layer.variance.copy_(change.variance)
    if (
        layer.bias is not None
        and layer.bias_variance is not None
        and drift.bias is not None
        and change.bias is not None
        and change.bias_variance is not None
    ):
        _move(layer.bias, drift.bias, change.bias, paces.mT, momentum)
        layer.bias_variance.copy_(change.bias_variance)


def _move(mean: Tensor, drift: Tensor, by: Tensor, pace: Tensor, momentum: float) -> None:
    """Move the means in place; a share of each move is repeated in the next minibatch."""
    if momentum:
        drift.mul_(momentum).addcmul_(by, pace)
        mean += drift
    else:
        mean.addcmul_(by, pace)


def _forget(layer: Layer, first: Layer, share: Tensor) -> None:
    """Set a layer to posterior^share N(0, first)^(1 - share), in place, after a sweep."""
    _blend(layer.mean, layer.variance, first.variance, share)
    if (
        layer.bias is not None
        and layer.bias_variance is not None
        and first.bias_variance is not None
    ):
        _blend(layer.bias, layer.bias_variance, first.bias_variance, share)


def _blend(mean: Tensor, variance: Tensor, first: Tensor, share: Tensor) -> None:
    precision = share / variance
    total = precision + (1 - share) / first
    mean.mul_(precision / total)
    variance.copy_(total.reciprocal_())


def _decide(layer: Layer, mean: Tensor, variance: Tensor) -> None:
    """Module B: update the log-odds of every group, in place (eq. 25 and 26, corrected).

    log eta is the evidence for zero over that for the slab: N(0; mu+, v+) / N(0; mu, v).
    """
    log_eta = 0.5 * (
        (layer.variance / variance).log()
        - mean.square() / variance
        + layer.mean.square() / layer.variance
    )
    open_ = layer.log_odds.abs() < CERTAIN
    moved = (layer.log_odds - log_eta.sum(1)).clamp(-CERTAIN, CERTAIN)
    layer.log_odds.copy_(torch.where(open_, moved, layer.log_odds))


class Residuals:
    """What the noise's update needs: moments over each client's last sweep."""

    def __init__(self, inference: Tdamp, cohort: Cohort, like: Tensor) -> None:
        per_sweep = [-(-size // inference.batch_size) for size in cohort.sizes]
        self.before = torch.tensor(
            [(inference.local_epochs - 1) * n for n in per_sweep], device=like.device
        )
        self.sums: dict[str, Tensor] = {}
        self.counts = like.new_zeros(len(cohort.sizes))
        self.step = 0

    def add(self, output: Output, batch: Batch) -> None:
        """Take a minibatch in, for the clients to whose last sweep it belongs."""
        k = len(batch.sizes)
        real = (self.before[:k] <= self.step).to(output.nll)[:, None].expand_as(output.nll)
        self.step += 1
        if batch.weight is not None:
            real = real * (batch.weight > 0)
        self.counts[:k] += real.sum(1)
        for name, values in output.residuals.items():
            total = self.sums.setdefault(name, torch.zeros_like(self.counts))
            total[:k] += (values * real).sum(1)

    def means(self) -> dict[str, Tensor]:
        """Return the moments by name, ``[K]``; of no samples, none."""
        return {name: total / self.counts.clamp_min(1) for name, total in self.sums.items()}
