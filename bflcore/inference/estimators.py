"""Estimators of the gradient of E_q[-log p(y | x, w)] for a mean-field Gaussian q.

All three have the same expectation and differ in variance and cost. (In a convolution, local
reparameterisation draws independent noise at each position although the positions share their
weights: the usual approximation.) Gradients are with respect to the mean and to log sigma; since
d/d(log sigma) = sigma d/d(sigma) = 2 sigma^2 d/d(sigma^2), each estimator differentiates with
respect to what is cheapest. Noise is drawn from each client's own generator, so a cohort of K
computes what K cohorts of one compute.
"""

from __future__ import annotations

import abc
import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

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
    """Base of estimators; built once per round for one problem."""

    def __init__(self, problem: Problem, streams: Sequence[torch.Generator]) -> None:
        self.problem = problem
        self.noise = Noise(streams)

    @abc.abstractmethod
    def __call__(self, mean: Tensor, sigma: Tensor, batch: Batch) -> Gradients:
        """Return the losses ``[k]`` and their gradients for the mean and log sigma ``[k, P]``.

        `mean` and `sigma` ``[k, P]``.
        """


def estimator(
    name: str, problem: Problem, streams: Sequence[torch.Generator], sample: Tensor
) -> Estimator:
    """Return the estimator called `name`; `sample` ``[1, ...]`` is any input of the network."""
    if name == "reparameterisation":
        return Reparameterisation(problem, streams)
    layer = LocalLayer if name == "local-reparameterisation" else FlipoutLayer
    return LayerwiseEstimator(problem, streams, layer, sample)


class Reparameterisation(Estimator):
    """One weight draw per minibatch: w = mean + sigma * eps (Blundell et al. 2015, eq. 2).

    Only dL/dw = g is differentiated; the gradients are then g and g * eps * sigma.
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
    """A linear or convolutional layer with Gaussian weights: its forward pass plus noise.

    `weight` and `bias` are the means; `weight_spread` and `bias_spread` say how much the weights
    vary, in the sense of each subclass. All four, and the buffers named in `noises`, are replaced
    at each call.
    """

    noises: ClassVar[tuple[str, ...]]
    weight_spread: Tensor
    bias_spread: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._layer = [layer]  # in a list, so that it is not a submodule
        for name in ("weight_spread", "bias_spread", *self.noises):
            self.register_buffer(name, torch.empty(0))

    def apply_with(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the layer on `x` ``[B, ...]`` with other parameters (shapes as in the layer)."""
        layer = self._layer[0]
        if isinstance(layer, nn.Linear):
            return functional.linear(x, weight, bias)
        return functional.conv2d(
            x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups
        )

    def apply_spread(self, x: Tensor) -> Tensor:
        """Run the layer on `x` ``[B, ...]`` with its spreads as parameters."""
        return self.apply_with(
            x, self.weight_spread, None if self.bias is None else self.bias_spread
        )

    @staticmethod
    @abc.abstractmethod
    def noise_shapes(layer: nn.Module, inputs: Tensor, outputs: Tensor) -> dict[str, torch.Size]:
        """Return the shape of each noise tensor per sample, from a batch ``[B, ...]``."""


class LocalLayer(PerturbedLayer):
    """Local reparameterisation: noise on pre-activations (Kingma et al. 2015, eq. 6).

    The spreads are variances.
    """

    noises = ("noise",)
    noise: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return pre-activations mean + sqrt(variance) * noise ``[B, ...]``."""
        variance = self.apply_spread(x.square())
        # The floor keeps the square root's gradient finite where an input is all zero.
        deviation = variance.clamp_min(torch.finfo(x.dtype).tiny).sqrt()
        return torch.addcmul(self.apply_with(x, self.weight, self.bias), deviation, self.noise)

    @staticmethod
    def noise_shapes(layer: nn.Module, inputs: Tensor, outputs: Tensor) -> dict[str, torch.Size]:
        """Return the shape of one normal per pre-activation ``[...]``."""
        del layer, inputs
        return {"noise": outputs.shape[1:]}


class FlipoutLayer(PerturbedLayer):
    """Flipout: one shared weight perturbation, its sign flipped per sample (Wen et al. 2018).

    The spreads are perturbations sigma * eps.
    """

    noises = ("sign_in", "sign_out")
    sign_in: Tensor
    sign_out: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return pre-activations W x + s_out * (Delta W (s_in * x)) ``[B, ...]``."""
        sign_in, sign_out = (
            torch.where(sign < 0, -1.0, 1.0).to(x.dtype) for sign in (self.sign_in, self.sign_out)
        )
        perturbation = self.apply_spread(x * sign_in)
        return torch.addcmul(self.apply_with(x, self.weight, self.bias), perturbation, sign_out)

    @staticmethod
    def noise_shapes(layer: nn.Module, inputs: Tensor, outputs: Tensor) -> dict[str, torch.Size]:
        """Return the shapes of one normal per input and output channel, for signs ``[C, 1, 1]``."""
        return {"sign_in": _channels(layer, inputs), "sign_out": _channels(layer, outputs)}


def _channels(layer: nn.Module, values: Tensor) -> torch.Size:
    """Return the shape in which one number per channel broadcasts over a sample of `values`."""
    if isinstance(layer, nn.Conv2d):
        return torch.Size((values.shape[1], 1, 1))
    return torch.Size((*(1 for _ in values.shape[1:-1]), values.shape[-1]))


class LayerwiseEstimator(Estimator):
    """Noise inside every linear and convolutional layer; other parameters are drawn as weights.

    Among the others are embeddings, recurrent weights, weights that several layers share, and
    layers that run more than once.
    """

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
        shapes = _noise_shapes(self.network, layer, sample)
        originals: dict[str, Any] = {path: self.network.get_submodule(path) for path in shapes}
        self.shapes = {
            f"{path}.{name}".lstrip("."): size
            for path, sizes in shapes.items()
            for name, size in sizes.items()
        }
        for path, module in originals.items():
            parent, _, name = path.rpartition(".")
            if path:
                setattr(self.network.get_submodule(parent), name, layer(module))
            else:
                self.network = layer(module)
        self.drawn = [  # parameters of all other layers (the scale of a norm, for example)
            name for name in problem.layout.names if name.rpartition(".")[0] not in originals
        ]

    def __call__(self, mean: Tensor, sigma: Tensor, batch: Batch) -> Gradients:
        shape = (len(mean), batch.y.shape[1])
        noise = {
            name: self.noise.fill(mean.new_zeros(shape + size), batch.sizes)
            for name, size in self.shapes.items()
        }
        eps = mean.new_empty(mean.shape if self.flips or self.drawn else 0)
        self.noise.fill(eps)
        # The leaves: means, spreads (see PerturbedLayer), and draws of the other parameters.
        spread = sigma * eps if self.flips else sigma.square()
        leaves = [mean.detach().requires_grad_(), spread.requires_grad_()]
        if self.drawn:
            leaves.append(torch.addcmul(mean, sigma, eps).requires_grad_())
        outputs = self.problem.shifted(self._outputs(batch.x, leaves, noise))
        nll = loss_per_client(self.problem, outputs, batch)
        d_mean, d_spread, *d_draw = torch.autograd.grad(nll.sum(), leaves)
        # d/d(log sigma): a perturbation is proportional to sigma, a variance to sigma^2.
        d_log_sigma = d_spread.mul_(spread.detach() if self.flips else 2 * spread.detach())
        if self.drawn:
            d_mean = d_mean + d_draw[0]
            d_log_sigma = d_log_sigma + d_draw[0] * eps * sigma
        return nll.detach(), d_mean, d_log_sigma

    def _outputs(self, x: Tensor, leaves: list[Tensor], noise: dict[str, Tensor]) -> Tensor:
        def call(x: Tensor, *tensors: Tensor) -> Tensor:
            vectors, noises = tensors[: len(leaves)], tensors[len(leaves) :]
            means, spreads, *draws = map(self.problem.layout.unflatten, vectors)
            parameters = dict(zip(noise, noises, strict=True))
            for name, value in means.items():
                if name in self.drawn:
                    parameters[name] = draws[0][name]
                else:
                    parameters |= {name: value, f"{name}_spread": spreads[name]}
            result: Tensor = functional_call(self.network, parameters, (x,))
            return result

        arguments = (x, *leaves, *noise.values())
        if len(x) == 1:
            return call(*(tensor.squeeze(0) for tensor in arguments)).unsqueeze(0)
        return vmap(call)(*arguments)


def _perturbable(module: nn.Module) -> bool:
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros"  # with other paddings, weights are drawn
    return type(module) is nn.Linear


def _noise_shapes(
    network: nn.Module, layer: type[PerturbedLayer], sample: Tensor
) -> dict[str, dict[str, torch.Size]]:
    """Return the noise shapes of each layer that can be perturbed, by path and buffer name.

    A layer that runs several times (a recurrence) is left out: its noise would be the same at each
    step, whatever its input, which no draw of its weights gives. So is one that shares a parameter
    with another layer: that parameter is one random variable.
    """
    calls: dict[str, list[dict[str, torch.Size]]] = {}

    def record(path: str, module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        calls.setdefault(path, []).append(layer.noise_shapes(module, inputs[0], outputs))

    users = Counter(id(one) for _, one in network.named_parameters(remove_duplicate=False))
    hooks = [
        module.register_forward_hook(partial(record, path))
        for path, module in network.named_modules()
        if _perturbable(module) and all(users[id(one)] == 1 for one in module.parameters())
    ]
    with torch.no_grad():
        network(sample)
    for hook in hooks:
        hook.remove()
    return {path: shapes for path, (shapes, *again) in calls.items() if not again}
