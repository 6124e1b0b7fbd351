"""The network as message passing sees it: linear layers with rectifiers between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor, nn

from bfl_tdamp.channels import Rectified, relu_forward
from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian, groups
from bflcore import IncompatibleError, Layout, Problem

__all__ = ["Layer", "chain", "layers"]

PASSES = (nn.Flatten, nn.ReLU, nn.Identity)
SMALLEST_VARIANCE = 1e-8  # of a pre-activation


@attrs.define(eq=False)
class Layer:
    """One linear layer of K clients: views of their posteriors, and what the last pass left.

    `mean`, `variance` ``[K, M, N]`` and `log_odds`, `centre` ``[K, N]``; `bias`, `bias_variance`
    ``[K, 1, M]``.
    """

    mean: Tensor
    variance: Tensor
    log_odds: Tensor
    centre: Tensor
    bias: Tensor | None
    bias_variance: Tensor | None

    def rows(self, k: int) -> Layer:
        """Return the layer of the first k clients."""
        bias = None if self.bias is None else self.bias[:k]
        spread = None if self.bias_variance is None else self.bias_variance[:k]
        return Layer(
            self.mean[:k], self.variance[:k], self.log_odds[:k], self.centre[:k], bias, spread
        )

    @property
    def decided(self) -> bool:
        """Whether every group is kept or removed for good."""
        return bool((self.log_odds.abs() >= CERTAIN).all())

    @property
    def kept(self) -> bool:
        """Whether every group is kept for good: effective weights are the slabs'."""
        return bool((self.log_odds >= CERTAIN).all())

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the weights under their prior of zeros."""
        if self.kept:
            return self.mean, self.variance
        rho = self.log_odds.sigmoid()[:, None]
        mean = rho * self.mean
        return mean, rho * self.variance + (1 - rho) * mean * self.mean


def chain(problem: Problem) -> list[str]:
    """Return the paths of the linear layers in the order in which a sample meets them.

    Raises `IncompatibleError` unless the network is linear layers with a rectifier between each
    two: other layers are refused by name, other wiring by comparing outputs on a random sample.
    """
    network = problem.network
    order: list[str] = []
    handles = []
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(_note(path, order)))
        elif not any(module.children()) and not isinstance(module, PASSES):
            raise IncompatibleError(_refusal(network, f"layer {path} is {type(module).__name__}"))
    noise = torch.Generator(problem.device).manual_seed(0)
    like = problem.train.x
    sample = torch.randn(2, *like.shape[1:], generator=noise, device=like.device).to(like.dtype)
    try:
        with torch.no_grad():
            found = network(sample)
    finally:
        for handle in handles:
            handle.remove()
    known = dict(network.named_modules())
    parameters = [p for path in order for p in known[path].parameters()]
    u = sample.flatten(1)
    with torch.no_grad():
        for depth, path in enumerate(order):
            if known[path].in_features != u.shape[1]:
                break
            u = known[path](u.relu() if depth else u)
    if (
        len(parameters) != len(list(network.parameters()))
        or found.shape != u.shape
        or not torch.allclose(found, u, rtol=1e-4, atol=1e-5)
    ):
        raise IncompatibleError(_refusal(network, "its layers are no chain with ReLU in between"))
    return order


def _note(path: str, order: list[str]) -> Callable[..., None]:
    return lambda *_: order.append(path)


def _refusal(network: nn.Module, why: str) -> str:
    return (
        f"inference tdamp: model {type(network).__name__} is not supported ({why}); allowed: "
        "linear layers with ReLU between them, as --model mlp or --model two-nn"
    )


def layers(problem: Problem, posterior: BernoulliGaussian, order: list[str]) -> list[Layer]:
    """Return views of posteriors ``[K, P]`` as layers: what is changed in them changes there."""
    layout, columns = problem.layout, groups(problem.layout)
    return [_layer(layout, columns, posterior, path) for path in order]


def _layer(layout: Layout, columns: Layout, q: BernoulliGaussian, path: str) -> Layer:
    weight, bias = f"{path}.weight".lstrip("."), f"{path}.bias".lstrip(".")
    shape = layout.shapes[layout.names.index(weight)]
    part, group = layout.slices[weight], columns.slices[weight]
    mean, variance = (t[:, part].unflatten(-1, shape) for t in (q.slab_mean, q.slab_variance))
    b = v = None
    if bias in layout.slices:
        b, v = (t[:, None, layout.slices[bias]] for t in (q.slab_mean, q.slab_variance))
    return Layer(mean, variance, q.log_odds[:, group], q.centre[:, group], b, v)


@attrs.define(eq=False)
class Pass:
    """What a layer's forward pass computed ``[K, B, ...]``, kept for the way back."""

    inputs: Tensor  # mean minus centre
    squares: Tensor  # of `inputs`
    weights: Tensor  # effective means
    p: Tensor
    variance: Tensor
    rectified: Rectified | None = None  # of hidden layers


def forward(net: list[Layer], x: Tensor) -> Iterator[Pass]:
    """Propagate means and variances of inputs ``[K, B, N]`` layer by layer (eq. 17-19).

    Inputs are centred: the independent treatment of the weights then costs least.
    """
    u, spread = x, None
    for i, layer in enumerate(net):
        w, v = layer.moments()
        inputs = u - layer.centre[:, None]
        squares = inputs.square()
        p = inputs @ w.mT
        if spread is None:
            variance = squares @ v.mT
        else:
            variance = (squares + spread) @ v.mT + spread @ w.square().mT
        if layer.bias is not None and layer.bias_variance is not None:
            p += layer.bias
            variance += layer.bias_variance
        variance.clamp_min_(SMALLEST_VARIANCE)
        hidden = relu_forward(p, variance) if i < len(net) - 1 else None
        yield Pass(inputs, squares, w, p, variance, hidden)
        if hidden is not None:
            u, spread = hidden.mean, hidden.variance
