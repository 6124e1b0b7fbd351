"""One minibatch of TDAMP for a whole cohort (Xu et al. 2024, section IV and Algorithm 1).

Module A, deep approximate message passing: moments go forward through the network, messages come
back, and the weights of every layer are updated as if they were independent. Module B: the messages
of a group's weights are combined with its prior odds. PasP: the posterior becomes the prior of the
next minibatch. Messages are not kept between minibatches.

Notation: z = W (u - a) + b are a layer's pre-activations, a its centre, z ~ N(p, V) before the
observations are known. A message is the residual S = (E z - p) / V and the precision
U = (1 - Var z / V) / V that the observations give z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import attrs

from bfl_tdamp.network import Layer, Slab, blocks, layers
from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bfl_tdamp import channels
    from bfl_tdamp.channels import Output, Rectified, Residual
    from bflcore import Posterior, Problem
    from bflcore.inference.gradient import Batch
else:
    channels = lazy("bfl_tdamp.channels")
    torch = lazy("torch")

__all__ = [
    "Forward",
    "Pace",
    "State",
    "forward_pass",
    "module_b",
    "own",
    "pass_messages",
    "temper",
]

TINY = 1e-30  # so that 0 / 0 gives 0
SMALLEST_VARIANCE = 1e-8  # of a pre-activation

# From p and V ``[K, B, C]``, targets and noise ``[K, 1, 1]`` to the messages of the observations.
Channel = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Output"]


class Pace(NamedTuple):
    """How far the means move: lengths by line `search` (False: 1), and the `momentum`."""

    search: bool = True
    momentum: float = 0.0


@attrs.frozen(eq=False)
class State:
    """The networks of K clients between two minibatches: views of flat tensors, changed in place.

    For each layer: its posterior, the `velocities` of its slabs' means, and the variances of the
    round's `prior`. `noise` ``[K, 1, 1]`` is the variance of the observations.
    """

    net: list[Layer]
    velocities: list[list[Tensor]]
    prior: list[list[Tensor]]
    noise: Tensor

    @classmethod
    def of(
        cls,
        problem: Problem,
        order: list[str],
        posterior: BernoulliGaussian,
        velocity: Tensor,
        prior: BernoulliGaussian,
    ) -> State:
        """Split `posterior`, `velocity` and `prior` ``[K, P]`` into the layers in `order`."""
        return cls(
            layers(problem, posterior, order),
            blocks(problem, velocity, order),
            blocks(problem, prior.slab_variance, order),
            posterior.noise[:, None],
        )

    def rows(self, k: int) -> State:
        """Return the state of the first k clients."""
        return State(
            [layer.rows(k) for layer in self.net],
            [[tensor[:k] for tensor in layer] for layer in self.velocities],
            [[tensor[:k] for tensor in layer] for layer in self.prior],
            self.noise[:k],
        )


@attrs.frozen(eq=False)
class Forward:
    """Results of a layer's forward pass ``[K, B, ...]`` that the backward pass needs."""

    inputs: Tensor  # mean minus centre
    squares: Tensor  # of `inputs`
    weights: Tensor  # posterior means rho mu
    p: Tensor
    variance: Tensor  # V
    rectified: Rectified | None = None  # of hidden layers


@attrs.frozen(eq=False)
class Proposal:
    """Module A's posterior of a layer's slabs.

    `weights` and `bias` are the change of the mean mu+ - mu, and the variance v+; `effect`
    ``[k, M, N]`` is the change of the weights' posterior mean, and `cost` ``[k, M]`` that of each
    row under the prior.
    """

    weights: Slab
    bias: Slab | None
    effect: Tensor
    cost: Tensor

    @property
    def slabs(self) -> list[Slab]:
        """Changes and variances in the order of `Layer.slabs`."""
        return [self.weights] if self.bias is None else [self.weights, self.bias]


def own(posterior: Posterior) -> BernoulliGaussian:
    """Return the posterior with its actual type."""
    assert isinstance(posterior, BernoulliGaussian)  # noqa: S101 - the registry admits no other
    return posterior


def pass_messages(
    state: State, batch: Batch, channel: Channel, copies: Tensor, pace: Pace
) -> Output:
    """Infer the weights from one minibatch; the `state` of its k clients is changed in place.

    Every sample is counted `copies` ``[k, 1, 1]`` times. Returns the result of the output channel.
    """
    passes = forward_pass(state.net, batch.x.flatten(2))
    output = channel(passes[-1].p, passes[-1].variance, batch.y, state.noise)
    messages = backward_pass(passes, output, batch, copies)
    proposals = [
        weight_update(layer, forward, message)
        for layer, forward, message in zip(state.net, passes, messages, strict=True)
    ]
    if pace.search:
        lengths = line_search(passes, proposals, messages)
    else:
        lengths = [torch.ones_like(proposal.cost) for proposal in proposals]
    for layer, velocities, proposal, length in zip(
        state.net, state.velocities, proposals, lengths, strict=True
    ):
        module_b(layer, proposal.weights)
        posterior_as_prior(layer, velocities, proposal, length, pace.momentum)
    return output


def forward_pass(net: list[Layer], x: Tensor) -> list[Forward]:
    """Propagate means and variances of inputs ``[K, B, N]`` layer by layer (eq. 17-19).

    The network's inputs are centred, which reduces the error of treating the weights as
    independent.
    """
    passes: list[Forward] = []
    mean, spread = x, None  # of the layer's inputs
    for depth, layer in enumerate(net):
        w, v = layer.moments()
        inputs = mean - layer.centre[:, None]
        squares = inputs.square()
        p = inputs @ w.mT  # eq. 17
        if spread is None:
            variance = squares @ v.mT
        else:
            variance = (squares + spread) @ v.mT + spread @ w.square().mT
        if layer.bias is not None:
            p += layer.bias.mean
            variance += layer.bias.variance
        variance.clamp_min_(SMALLEST_VARIANCE)
        rectified = None
        if depth < len(net) - 1:
            rectified = channels.relu_forward(p, variance)
            mean, spread = rectified.mean, rectified.variance
        passes.append(Forward(inputs, squares, w, p, variance, rectified))
    return passes


def backward_pass(
    passes: list[Forward], output: Output, batch: Batch, copies: Tensor
) -> list[Residual]:
    """Return the message to every layer's pre-activations, from the outputs back to the inputs.

    The message to a layer's inputs u is exp(h u - Lambda u^2 / 2) with Lambda = U (w^2) and
    h = E[u] Lambda + S w, w the weights' means.
    """
    real = None if batch.weight is None else (batch.weight > 0).to(output.s.dtype)[..., None]
    s, u = output.s, output.u
    messages = []
    for depth in reversed(range(len(passes))):
        if real is not None:
            s, u = s * real, u * real  # padding has no message
        messages.append(channels.Residual(s * copies, u * copies))
        if depth:
            w, z = passes[depth].weights, _hidden(passes[depth - 1])
            precision, gradient = u @ w.square(), s @ w
            s, u = channels.relu_backward(z, z.mean * precision + gradient, precision)
    return messages[::-1]


def weight_update(layer: Layer, forward: Forward, message: Residual) -> Proposal:
    """Multiply a layer's prior by its messages.

    v+ = v / (1 + v Lambda), mu+ = v+ (mu / v + w Lambda + g) with Lambda = U^T u^2, g = S^T u;
    biases likewise. Tensors ``[k, M, N]`` are reused: after the matrix products, passes over them
    are the main cost of a minibatch.
    """
    s, u = message
    mu, v = layer.weights
    lam, change = u.mT @ forward.squares, s.mT @ forward.inputs  # Lambda and g
    if not layer.kept:  # the messages are expanded around the posterior means
        change.addcmul_(forward.weights - mu, lam)
    variance = torch.div(v, lam.mul_(v).add_(1), out=lam)  # v+
    change.mul_(variance)  # mu+ - mu
    effect = change if layer.kept else layer.log_odds.sigmoid()[:, None] * change
    cost = torch.square(change).div_(v).sum(-1)
    bias = None
    if layer.bias is not None:
        bias = _bias_update(layer.bias, message)
        cost += (bias.mean.square() / layer.bias.variance)[:, 0]
    return Proposal(Slab(change, variance), bias, effect, cost)


def _bias_update(bias: Slab, message: Residual) -> Slab:
    lam, g = message.u.sum(1, keepdim=True), message.s.sum(1, keepdim=True)
    variance = bias.variance / (1 + bias.variance * lam)
    return Slab(variance * g, variance)


def line_search(
    passes: list[Forward], proposals: list[Proposal], messages: list[Residual]
) -> list[Tensor]:
    """Return the step length of every row of every layer, ``[k, M]``, instead of damping by hand.

    A row's length maximises its local quadratic along the change. Simultaneous steps of all layers
    may overshoot: they are propagated to the outputs, where the last message is the local
    quadratic, and the common factor that maximises it multiplies the lengths of all rows.
    """
    lengths: list[Tensor] = []
    gain = cost = passes[0].p.new_zeros(())
    change: Tensor | None = None  # of the pre-activations
    for depth, (forward, proposal) in enumerate(zip(passes, proposals, strict=True)):
        moved = forward.inputs @ proposal.effect.mT
        if proposal.bias is not None:
            moved += proposal.bias.mean
        rows = (moved * messages[depth].s).sum(1)  # the gain of every row's full step
        length = _maximiser(rows, proposal.cost + _curvature(moved, messages[depth]))
        gain = gain + (rows * length).sum(1)
        cost = cost + (proposal.cost * length.square()).sum(1)
        moved = moved * length[:, None]
        if change is not None:
            active = 1 - _hidden(passes[depth - 1]).below.cdf  # P(z > 0)
            moved = moved + (change * active) @ forward.weights.mT
        change = moved
        lengths.append(length)
    assert change is not None  # noqa: S101 - a network has a layer
    common = _maximiser(gain, cost + _curvature(change, messages[-1]).sum(1))
    return [length * common[:, None] for length in lengths]


def _curvature(moved: Tensor, message: Residual) -> Tensor:
    """Return the sum of D^2 U over a minibatch ``[k, M]``, for a change D ``[k, B, M]``."""
    return (moved.square() * message.u).sum(1)


def _maximiser(gain: Tensor, cost: Tensor) -> Tensor:
    """Return the maximiser over [0, 1] of gain t - cost t^2 / 2."""
    return (gain / cost.clamp_min(TINY)).clamp(0, 1)


def _hidden(forward: Forward) -> Rectified:
    assert forward.rectified is not None  # noqa: S101 - every layer but the last has a ReLU
    return forward.rectified


def module_b(layer: Layer, proposal: Slab) -> None:
    """Update the log-odds of every undecided group, in place (eq. 25 and 26, corrected).

    eta is the ratio of the evidence for zero to that for the slab, N(0; mu+, v+) / N(0; mu, v), and
    logit rho+ = logit rho - the sum of log eta over the group. `proposal` is mu+ - mu and v+.
    """
    if layer.decided:
        return
    mu, v = layer.weights
    log_eta = 0.5 * (
        (v / proposal.variance).log()
        - (mu + proposal.mean).square() / proposal.variance
        + mu.square() / v
    )
    undecided = layer.log_odds.abs() < CERTAIN
    updated = (layer.log_odds - log_eta.sum(1)).clamp(-CERTAIN, CERTAIN)
    layer.log_odds.copy_(torch.where(undecided, updated, layer.log_odds))


def posterior_as_prior(
    layer: Layer, velocities: list[Tensor], proposal: Proposal, length: Tensor, momentum: float
) -> None:
    """Make a layer's posterior the prior of the next minibatch, in place (PasP, eq. 27).

    The means of row m move by the fraction `length` ``[k, M]`` of the proposed change; the next
    minibatch repeats the fraction `momentum` of every change.
    """
    lengths = length[..., None]  # [k, M, 1]
    for slab, velocity, change, fraction in zip(
        layer.slabs, velocities, proposal.slabs, [lengths, lengths.mT], strict=False
    ):
        if momentum:
            velocity.mul_(momentum).addcmul_(change.mean, fraction)
            slab.mean.add_(velocity)
        else:
            slab.mean.addcmul_(change.mean, fraction)
        slab.variance.copy_(change.variance)


def temper(state: State, share: Tensor) -> None:
    """Set the slabs to posterior^share N(0, prior variance)^(1 - share), in place.

    `share` ``[k, 1]``.
    """
    share = share[..., None]
    for layer, prior in zip(state.net, state.prior, strict=True):
        for slab, first in zip(layer.slabs, prior, strict=True):
            precision = share / slab.variance
            total = precision + (1 - share) / first
            slab.mean.mul_(precision / total)
            slab.variance.copy_(total.reciprocal_())
