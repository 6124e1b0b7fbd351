"""Monte-Carlo dropout: the numerics of the inference `mc-dropout`.

Dropout acts on the inputs of every linear and convolutional layer but the first one that runs: on
hidden units, never on the data (Gal & Ghahramani 2016, section 3). A mask is a buffer of its layer
that is set at each call, so a step is a function of parameters, samples and masks alone, and
masks come from each client's own generator.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from bflcore.errors import OptionError
from bflcore.inference.gradient import Gradient
from bflcore.inference.memory import join_personal
from bflcore.inference.normals import Noise

if TYPE_CHECKING:
    from bfl_aggregators.plugin import MCDropout
    from bflcore import Cohort, Posterior, Predictive, Problem
    from bflcore.inference.gradient import Batch

__all__ = ["DropoutGradient", "check", "masked", "predict"]

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MASK = "dropout_mask"

Shapes = dict[str, torch.Size]


def masked(problem: Problem) -> tuple[Problem, Shapes]:
    """Return the problem with a network that takes masks, and their shapes for one sample.

    Masks are buffers by name, and multiply the inputs of the layers they belong to. A layer that
    runs more than once applies the same mask each time.
    """
    network = copy.deepcopy(problem.network)
    inputs: Shapes = {}  # in the order in which layers run

    def recorder(path: str) -> Any:
        def record(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            del module
            inputs.setdefault(path, arguments[0].shape[1:])

        return record

    handles = [
        module.register_forward_pre_hook(recorder(path))
        for path, module in network.named_modules()
        if isinstance(module, WEIGHTED)
    ]
    with torch.no_grad():
        network(problem.train.x[:1])
    for handle in handles:
        handle.remove()
    shapes: Shapes = {}
    for path, shape in list(inputs.items())[1:]:
        layer = network.get_submodule(path)
        layer.register_buffer(MASK, torch.empty(0))
        layer.register_forward_pre_hook(_multiply)
        shapes[f"{path}.{MASK}"] = shape
    return attrs.evolve(problem, network=network), shapes


def _multiply(layer: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *others = arguments
    return (x * getattr(layer, MASK), *others)


def check(problem: Problem) -> None:
    """Refuse a network without hidden units."""
    if not masked(problem)[1]:
        raise OptionError(
            "--inference: mc-dropout needs a model of two linear or convolutional layers at least, "
            "this one has no hidden units to drop; choose --model mlp or --inference map"
        )


def draw(noise: Noise, out: Tensor, rate: float, sizes: tuple[int, ...] = ()) -> Tensor:
    """Return masks of the shape of `out` ``[k, ...]``: 0 with probability `rate`, else 1/(1-rate).

    A standard normal falls below the quantile of `rate` just as often. `out` is scratch.
    """
    quantile = float(torch.special.ndtri(torch.tensor(rate, dtype=torch.float64)))
    kept = noise.fill(out, sizes) > quantile
    return kept.to(out.dtype).mul_(1 / (1 - rate))


class DropoutGradient:
    """The loss of K networks and its gradient, a fresh mask for every sample."""

    def __init__(self, inference: MCDropout, problem: Problem, cohort: Cohort) -> None:
        problem, self._shapes = masked(problem)
        self._rate = inference.rate
        self._noise = Noise(cohort.streams("dropout"))
        self._gradient = Gradient(problem)

    def __call__(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the losses ``[k]`` and the gradient ``[k, P]`` at `weights` ``[k, P]``."""
        leading = batch.y.shape[:2]
        masks = {
            name: draw(self._noise, weights.new_zeros(leading + shape), self._rate, batch.sizes)
            for name, shape in self._shapes.items()
        }
        return self._gradient(weights, batch, masks)


def predict(
    inference: MCDropout,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
    streams: list[torch.Generator],
) -> Predictive:
    """Predict with `predict_draws` masks, each shared by all samples of a client.

    Behind a linear layer's mask lies one draw of its weights (Gal & Ghahramani 2016, eq. 8).
    """
    weights = join_personal(problem, posterior, memory, len(x)).mean
    problem, shapes = masked(problem)
    noise = Noise(streams)
    outputs = []
    for _ in range(inference.predict_draws):
        masks = {
            name: draw(noise, weights.new_empty(len(x), 1, *shape), inference.rate)
            for name, shape in shapes.items()
        }
        outputs.append(problem.forward(weights, x, masks))
    return problem.likelihood.predictive(torch.stack(outputs, dim=1))
