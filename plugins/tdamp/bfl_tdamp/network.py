"""The form of networks in message passing: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import attrs

from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian, groups
from bflcore import IncompatibleError, Layout, Problem
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy("torch")
    nn = lazy("torch.nn")

__all__ = ["Layer", "Slab", "blocks", "chain", "layers", "parameter_names"]


class Slab(NamedTuple):
    """Gaussians over a layer's weights ``[K, M, N]`` or its biases ``[K, 1, M]``."""

    mean: Tensor
    variance: Tensor


@attrs.frozen(eq=False)
class Layer:
    """One linear layer of K clients: views of their posteriors.

    `weights` are the slabs of the weights ``[K, M, N]``, `bias` those of the biases ``[K, 1, M]``
    if there are any; `log_odds` and `centre` are ``[K, N]``.
    """

    weights: Slab
    bias: Slab | None
    log_odds: Tensor
    centre: Tensor

    def rows(self, k: int) -> Layer:
        """Return the layer of the first k clients."""
        slabs = [Slab(slab.mean[:k], slab.variance[:k]) for slab in self.slabs]
        return Layer(slabs[0], slabs[1] if self.bias else None, self.log_odds[:k], self.centre[:k])

    @property
    def slabs(self) -> list[Slab]:
        """The slabs of the weights and, if there are any, of the biases."""
        return [self.weights] if self.bias is None else [self.weights, self.bias]

    @property
    def decided(self) -> bool:
        """Whether every group is kept or removed for good."""
        return bool((self.log_odds.abs() >= CERTAIN).all())

    @property
    def kept(self) -> bool:
        """Whether every group is kept for good (rho = 1)."""
        return bool((self.log_odds >= CERTAIN).all())

    def moments(self) -> Slab:
        """Return the moments ``[K, M, N]`` of the weights under the group-sparse posterior."""
        if self.kept:
            return self.weights
        rho = self.log_odds.sigmoid()[:, None]
        mu, v = self.weights
        mean = rho * mu
        return Slab(mean, rho * v + (1 - rho) * mean * mu)


def chain(problem: Problem) -> list[str]:
    """Return the paths of the linear layers in the order in which they are applied.

    Raises `IncompatibleError` unless the network consists of linear layers with ReLU between them:
    other layers are detected by type, other wiring by the outputs on a random sample.
    """
    network, like = problem.network, problem.train.x
    noise = torch.Generator(problem.device).manual_seed(0)
    sample = torch.randn(2, *like.shape[1:], generator=noise, device=like.device).to(like.dtype)
    order, outputs = _trace(network, sample)
    linear = [network.get_submodule(path) for path in order]
    u = sample.flatten(1)
    with torch.no_grad():
        for depth, layer in enumerate(linear):
            if layer.in_features != u.shape[1]:
                break
            u = layer(u.relu() if depth else u)
    if (
        sum(len(list(layer.parameters())) for layer in linear) != len(list(network.parameters()))
        or outputs.shape != u.shape
        or not torch.allclose(outputs, u, rtol=1e-4, atol=1e-5)
    ):
        raise _unsupported(network, "it is not a chain of linear layers with ReLU between them")
    return order


def _trace(network: nn.Module, sample: Tensor) -> tuple[list[str], Tensor]:
    """Return the paths of the linear layers in the order in which they run, and the outputs."""
    order: list[str] = []
    handles = []
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(_append(path, order)))
        elif not any(module.children()) and not isinstance(
            module, nn.Flatten | nn.ReLU | nn.Identity
        ):
            raise _unsupported(network, f"layer {path} is {type(module).__name__}")
    try:
        with torch.no_grad():
            return order, network(sample)
    finally:
        for handle in handles:
            handle.remove()


def _append(path: str, order: list[str]) -> Callable[..., None]:
    return lambda *_: order.append(path)


def _unsupported(network: nn.Module, why: str) -> IncompatibleError:
    return IncompatibleError(
        f"inference tdamp: model {type(network).__name__} is not supported ({why}); allowed: "
        "linear layers with ReLU between them, e.g. --model mlp or --model two-nn"
    )


def parameter_names(layout: Layout, path: str) -> list[str]:
    """Return the names of a linear layer's weights and, if it has any, of its biases."""
    names = [f"{path}.weight".lstrip("."), f"{path}.bias".lstrip(".")]
    return [name for name in names if name in layout.slices]


def blocks(problem: Problem, values: Tensor, order: list[str]) -> list[list[Tensor]]:
    """Return views of `values` ``[K, P]``: per layer ``[K, M, N]`` and, if any, ``[K, 1, M]``."""
    layout = problem.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))

    def block(name: str) -> Tensor:
        flat = values[:, layout.slices[name]]
        return flat.unflatten(-1, shapes[name]) if len(shapes[name]) == 2 else flat[:, None]

    return [[block(name) for name in parameter_names(layout, path)] for path in order]


def layers(problem: Problem, posterior: BernoulliGaussian, order: list[str]) -> list[Layer]:
    """Return the posterior ``[K, P]`` as layers; these are views, so changes affect it."""
    columns = groups(problem.layout)
    means = blocks(problem, posterior.slab_mean, order)
    variances = blocks(problem, posterior.slab_variance, order)
    found = []
    for path, mean, variance in zip(order, means, variances, strict=True):
        weights, *bias = map(Slab, mean, variance)
        group = columns.slices[parameter_names(problem.layout, path)[0]]
        found.append(
            Layer(
                weights,
                bias[0] if bias else None,
                posterior.log_odds[:, group],
                posterior.centre[:, group],
            )
        )
    return found
