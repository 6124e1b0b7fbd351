"""Estimators of the gradient of E_q[-log p(y | x, w)] for a mean-field Gaussian q.

All three have the same expectation and differ in variance and cost (in a convolution, local
reparameterisation draws the noise of each position by itself though the positions share their
weights: an approximation, as is usual there). Gradients are taken in the
mean and in log sigma: d/d(log sigma) = sigma d/d(sigma) = 2 sigma^2 d/d(sigma^2), so that each
estimator differentiates what is cheapest for it. Noise enters as tensors drawn from each client's
own generator, so a cohort of K computes what K cohorts of one compute.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from bflcore.inference.gradient import Batch, Gradient, loss_per_client
from bflcore.inference.normals import Noise

if TYPE_CHECKING:
    from bflcore.problem.base import Problem

__all__ = ["Estimator", "estimator"]

Gradients = tuple[Tensor, Tensor, Tensor]


class Estimator(abc.ABC):
    """Base of estimators; made once a round for one problem."""

    def __init__(self, problem: Problem, streams: Sequence[torch.Generator]) -> None:
        self.problem = problem
        self.noise = Noise(streams)

    @abc.abstractmethod
    def __call__(self, mean: Tensor, sigma: Tensor, batch: Batch) -> Gradients:
        """Return the loss ``[k]`` and its gradients in the mean and in log sigma ``[k, P]``."""


def estimator(
    name: str, problem: Problem, streams: Sequence[torch.Generator], sample: Tensor
) -> Estimator:
    """Return the estimator called `name`; `sample` ``[1, ...]`` shows what the network sees."""
    if name == "reparameterisation":
        return Reparameterisation(problem, streams)
    layer = LocalLayer if name == "local-reparameterisation" else FlipoutLayer
    return LayerwiseEstimator(problem, streams, layer, sample)


class Reparameterisation(Estimator):
    """One weight draw per minibatch: w = mean + sigma * eps (Blundell et al. 2015, eq. 2).

    The weights are the leaf: with g = dL/dw, the gradients are g and g * eps * sigma.
    """

    def __init__(self, problem: Problem, streams: Sequence[torch.Generator]) -> None:
        super().__init__(problem, streams)
        self.gradient = Gradient(problem)
        self.buffers = problem.initial.new_empty(2, len(streams), len(problem.initial))

    def __call__(self, mean: Tensor, sigma: Tensor, batch: Batch) -> Gradients:
        eps, w = self.buffers[:, : len(mean)]
        torch.addcmul(mean, sigma, self.noise.fill(eps), out=w)
        nll, gradient = self.gradient(w, batch)
        return nll, gradient, torch.mul(eps, gradient, out=w).mul_(sigma)


class PerturbedLayer(nn.Module, abc.ABC):
    """A linear or convolutional layer whose weights are Gaussian.

    `weight` and `bias` hold means, `weight_spread` and `bias_spread` how far they vary; all are
    set at each call. The forward pass is that of the layer it stands for, plus noise.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._layer = [layer]  # in a list, so that it is no submodule
        self.weight_spread = nn.Buffer(torch.empty(0))
        self.bias_spread = nn.Buffer(torch.empty(0))

    def apply_with(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the layer with other parameters."""
        layer = self._layer[0]
        if isinstance(layer, nn.Linear):
            return functional.linear(x, weight, bias)
        return functional.conv2d(
            x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups
        )

    def apply_spread(self, x: Tensor) -> Tensor:
        """Run the layer with its spreads for parameters."""
        return self.apply_with(
            x, self.weight_spread, None if self.bias is None else self.bias_spread
        )

    @staticmethod
    @abc.abstractmethod
    def noise_shapes(layer: nn.Module, inputs: Tensor, outputs: Tensor) -> dict[str, torch.Size]:
        """Return, for one sample, the shape of each noise tensor the layer takes."""


class LocalLayer(PerturbedLayer):
    """Local reparameterisation: noise on pre-activations (Kingma et al. 2015, eq. 6).

    Its spreads are variances.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__(layer)
        self.noise = nn.Buffer(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return mean + sqrt(variance) * noise of the pre-activations."""
        variance = self.apply_spread(x.square())
        # The floor keeps the square root's gradient finite where an input is all zero.
        deviation = variance.clamp_min(torch.finfo(x.dtype).tiny).sqrt()
        return torch.addcmul(self.apply_with(x, self.weight, self.bias), deviation, self.noise)

    @staticmethod
    def noise_shapes(layer: nn.Module, inputs: Tensor, outputs: Tensor) -> dict[str, torch.Size]:
        """One normal a pre-activation."""
        del layer, inputs
        return {"noise": outputs.shape[1:]}


class FlipoutLayer(PerturbedLayer):
    """Flipout: one shared weight perturbation, its sign flipped per sample (Wen et al. 2018).

    Its spreads are perturbations, sigma * eps.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__(layer)
        self.sign_in = nn.Buffer(torch.empty(0))
        self.sign_out = nn.Buffer(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s_out * (Delta W (s_in * x))."""
        sign_in, sign_out = (
            torch.where(sign < 0, -1.0, 1.0).to(x.dtype) for sign in (self.sign_in, self.sign_out)
        )
        perturbation = self.apply_spread(x * sign_in)
        return torch.addcmul(self.apply_with(x, self.weight, self.bias), perturbation, sign_out)

    @staticmethod
    def noise_shapes(layer: nn.Module, inputs: Tensor, outputs: Tensor) -> dict[str, torch.Size]:
        """One sign an input and an output channel; the sign of a normal is a fair coin."""
        return {"sign_in": _channels(layer, inputs), "sign_out": _channels(layer, outputs)}


def _channels(layer: nn.Module, values: Tensor) -> torch.Size:
    """Return the shape in which one number a channel spreads over a sample of `values`."""
    if isinstance(layer, nn.Conv2d):
        return torch.Size((values.shape[1], 1, 1))
    return torch.Size((*(1 for _ in values.shape[1:-1]), values.shape[-1]))


class LayerwiseEstimator(Estimator):
    """Noise inside every linear and convolutional layer; other parameters are drawn whole."""

    def __init__(
        self,
        problem: Problem,
        streams: Sequence[torch.Generator],
        layer: type[PerturbedLayer],
        sample: Tensor,
    ) -> None:
        super().__init__(problem, streams)
        self.flips = layer is FlipoutLayer
        self.network = copy.deepcopy(problem.network).requires_grad_(False)
        originals = {
            path: module for path, module in self.network.named_modules() if _perturbable(module)
        }
        self.shapes = _noise_shapes(self.network, originals, layer, sample)
        for path, module in originals.items():
            self._replace(path, layer(module))
        self.drawn = [  # parameters of all other layers (a norm's scale, say)
            name for name in problem.layout.names if name.rpartition(".")[0] not in originals
        ]

    def __call__(self, mean: Tensor, sigma: Tensor, batch: Batch) -> Gradients:
        shape = (len(mean), batch.y.shape[1])
        noise = {
            name: self.noise.fill(mean.new_zeros(shape + size), batch.sizes)
            for name, size in self.shapes.items()
        }
        eps = None
        if self.flips or self.drawn:
            eps = self.noise.fill(mean.new_empty(mean.shape))
        # The leaves: means, spreads (see PerturbedLayer), and whole draws of other parameters.
        spread = sigma * eps if self.flips and eps is not None else sigma.square()
        leaves = [mean.detach().requires_grad_(), spread.requires_grad_()]
        if self.drawn and eps is not None:
            leaves.append(torch.addcmul(mean, sigma, eps).requires_grad_())
        outputs = self._outputs(batch.x, leaves, noise)
        nll = loss_per_client(self.problem, outputs, batch)
        d_mean, d_spread, *d_draw = torch.autograd.grad(nll.sum(), leaves)
        # d/d(log sigma): a perturbation is proportional to sigma, a variance to sigma^2.
        d_log_sigma = d_spread.mul_(spread.detach() if self.flips else 2 * spread.detach())
        if d_draw and eps is not None:
            d_mean = d_mean + d_draw[0]
            d_log_sigma = d_log_sigma + d_draw[0] * eps * sigma
        return nll.detach(), d_mean, d_log_sigma

    def _outputs(self, x: Tensor, leaves: list[Tensor], noise: dict[str, Tensor]) -> Tensor:
        count = len(leaves)

        def call(x: Tensor, *tensors: Tensor) -> Tensor:
            parameters = self._parameters(*tensors[:count])
            parameters |= dict(zip(noise, tensors[count:], strict=True))
            result: Tensor = functional_call(self.network, parameters, (x,))
            return result

        arguments = (x, *leaves, *noise.values())
        if len(x) == 1:
            return call(*(tensor.squeeze(0) for tensor in arguments)).unsqueeze(0)
        return vmap(call)(*arguments)

    def _parameters(
        self, mean: Tensor, spread: Tensor, draw: Tensor | None = None
    ) -> dict[str, Tensor]:
        layout = self.problem.layout
        spreads = layout.unflatten(spread)
        tensors = layout.unflatten(mean)
        tensors |= {
            f"{name}_spread": spreads[name] for name in layout.names if name not in self.drawn
        }
        if draw is not None:
            draws = layout.unflatten(draw)
            tensors |= {name: draws[name] for name in self.drawn}
        return tensors

    def _replace(self, path: str, module: nn.Module) -> None:
        if not path:
            self.network = module
            return
        parent, _, name = path.rpartition(".")
        setattr(self.network.get_submodule(parent), name, module)


def _perturbable(module: nn.Module) -> bool:
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros"  # other paddings are drawn whole
    return type(module) is nn.Linear


def _noise_shapes(
    network: nn.Module,
    layers: dict[str, nn.Module],
    layer: type[PerturbedLayer],
    sample: Tensor,
) -> dict[str, torch.Size]:
    shapes: dict[str, torch.Size] = {}

    def record(path: str) -> object:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            prefix = f"{path}." if path else ""
            for name, shape in layer.noise_shapes(module, inputs[0], outputs).items():
                shapes[prefix + name] = shape

        return hook

    handles = [module.register_forward_hook(record(path)) for path, module in layers.items()]  # type: ignore[arg-type]
    with torch.no_grad():
        network(sample)
    for handle in handles:
        handle.remove()
    return shapes
