"""Export of a posterior as a smaller network without the removed groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor, nn

from bfl_tdamp.message_passing import own
from bfl_tdamp.network import Layer, chain, layers

if TYPE_CHECKING:
    from bflcore import Posterior, Problem

__all__ = ["Pruned", "input_image", "pruned"]

KEPT = 0.5  # smallest probability of a group to keep
REPEATS = 50  # number of timed forward passes


@attrs.frozen(eq=False)
class Pruned:
    """A network of posterior means without the removed neurons.

    `inputs` ``[N]`` are the positions that the network reads in the flattened sample, `widths` the
    sizes of its layers, inputs first.
    """

    network: nn.Sequential
    inputs: Tensor
    widths: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs ``[B, C]`` for complete samples ``[B, ...]``."""
        found: Tensor = self.network(x.flatten(1)[:, self.inputs])
        return found

    @property
    def parameters(self) -> int:
        """Number of remaining parameters."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    def seconds(self, x: Tensor) -> float:
        """Return the median seconds of a forward pass over complete samples ``[B, ...]``."""
        times = []
        with torch.no_grad():
            for _ in range(REPEATS):
                clock = time.perf_counter()
                self(x)
                times.append(time.perf_counter() - clock)
        return median(times)


def pruned(problem: Problem, posterior: Posterior) -> Pruned:
    """Return the smaller network of a fused posterior ``[P]``.

    Its outputs are those of the posterior means. Removing a group removes a column of its layer and
    the corresponding row of the layer before.
    """
    net = layers(problem, own(posterior).map(lambda tensor: tensor[None]), chain(problem))
    keep = [(layer.log_odds[0].sigmoid() >= KEPT).nonzero()[:, 0] for layer in net]
    rows = [*keep[1:], torch.arange(net[-1].weights.mean.shape[1], device=keep[0].device)]
    modules: list[nn.Module] = []
    for layer, columns, row in zip(net, keep, rows, strict=True):
        modules += [_linear(layer, columns, row), nn.ReLU()]
    widths = (*(len(columns) for columns in keep), len(rows[-1]))
    return Pruned(nn.Sequential(*modules[:-1]).requires_grad_(False), keep[0], widths)


def _linear(layer: Layer, columns: Tensor, rows: Tensor) -> nn.Linear:
    weight = layer.moments().mean[0][:, columns]
    # The bias of the posterior is the pre-activation at the centre: z = W (u - centre) + b.
    bias = -(weight @ layer.centre[0, columns])
    if layer.bias is not None:
        bias = bias + layer.bias.mean[0, 0]
    linear = nn.Linear(len(columns), len(rows), device=weight.device, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight[rows].clone())
    linear.bias = nn.Parameter(bias[rows].clone())
    return linear


def input_image(model: Pruned, shape: Sequence[int], path: Path) -> None:
    """Draw which pixels of images of `shape` ``[C, H, W]`` the network reads, as a PNG at `path`.

    Brightness is the fraction of a pixel's channels that it reads.
    """
    from matplotlib.figure import Figure

    channels, height, width = shape
    read = torch.zeros(channels * height * width)
    read[model.inputs.cpu()] = 1
    figure = Figure(figsize=(3, 3 * height / width), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(read.view(channels, height, width).mean(0).numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_title(f"{len(model.inputs)} of {read.numel()} inputs are read", fontsize=9)
    axes.axis("off")
    figure.savefig(path, dpi=150, format="png")
