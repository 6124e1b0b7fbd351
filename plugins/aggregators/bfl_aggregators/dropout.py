"""The inference `mc-dropout`: a point estimate with dropout in training and prediction.

Dropout acts on the inputs of every linear and convolutional layer except the first: on hidden
units, never on the data (Gal & Ghahramani 2016, section 3). An embedding counts as a first layer;
in the model `stacked-lstm`, dropout thus acts on the last state alone. Masks are buffers that are
replaced at each call, so that a step depends on parameters, samples and masks alone; they are drawn
from each client's own generator.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import attrs

from bflcore import OptionError, PointInference, component, option
from bflcore.inference.gradient import Gradient
from bflcore.inference.memory import join_personal
from bflcore.inference.normals import Noise
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bflcore import Broadcast, Cohort, Predictive, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient
else:
    torch = lazy("torch")
    nn = lazy("torch.nn")

__all__ = ["DropoutGradient", "MCDropout", "draw_mask", "mask_hidden_units"]

MASK = "dropout_mask"

Shapes = dict[str, "torch.Size"]


@component
class MCDropout(PointInference):
    """Train a point estimate with dropout on hidden units, and keep dropout on to predict.

    Minimises the same objective as `map`, with a mask per sample; predictions average over masks.
    """

    name = "mc-dropout"
    reference = "Fischer, Orescanin, Loomis & McClure 2024 (dropout 0.2); Gal & Ghahramani 2016"

    rate: float = option(0.2, "probability that a hidden unit is dropped", at_least=0, below=1)
    predict_draws: int = option(10, "masks averaged per prediction (S)", at_least=1)

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` for a network without hidden units."""
        if not mask_hidden_units(problem)[1]:
            raise OptionError(
                "--inference: mc-dropout needs a model with at least two linear or convolutional "
                "layers; this one has no hidden units to drop; choose --model mlp or "
                "--inference map"
            )

    def gradient(self, problem: Problem, cohort: Cohort) -> LossAndGradient:
        """Return the function that computes losses and gradients under fresh masks."""
        return DropoutGradient(self.rate, problem, cohort)

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Average over `predict_draws` masks, each shared by all samples of a client.

        A mask on a linear layer's inputs is a draw of its weights (Gal & Ghahramani 2016, eq. 8).
        """
        weights = join_personal(problem, broadcast.start, cohort).mean
        problem, shapes = mask_hidden_units(problem)
        noise = Noise(cohort.streams("predict"))
        outputs = []
        for _ in range(self.predict_draws):
            masks = {
                name: draw_mask(noise, weights.new_empty(len(x), 1, *shape), self.rate)
                for name, shape in shapes.items()
            }
            outputs.append(problem.forward(weights, x, masks))
        return problem.likelihood.predictive(torch.stack(outputs, dim=1))


class DropoutGradient:
    """The losses of K networks and their gradients, with a fresh mask for every sample."""

    def __init__(self, rate: float, problem: Problem, cohort: Cohort) -> None:
        problem, self._shapes = mask_hidden_units(problem)
        self._rate = rate
        self._noise = Noise(cohort.streams("dropout"))
        self._gradient = Gradient(problem)

    def __call__(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the losses ``[k]`` and the gradients ``[k, P]`` at `weights` ``[k, P]``."""
        leading = batch.y.shape[:2]
        masks = {
            name: draw_mask(
                self._noise, weights.new_zeros(leading + shape), self._rate, batch.sizes
            )
            for name, shape in self._shapes.items()
        }
        return self._gradient(weights, batch, masks)


def mask_hidden_units(problem: Problem) -> tuple[Problem, Shapes]:
    """Return the problem with a network that takes masks, and the masks' shapes per sample.

    Each mask is a named buffer of a layer and multiplies the inputs of that layer. A layer that
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
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding)
    ]
    with torch.no_grad():
        network(problem.train.x[:1])
    for handle in handles:
        handle.remove()
    shapes: Shapes = {}
    for path, shape in list(inputs.items())[1:]:
        layer = network.get_submodule(path)
        if isinstance(layer, nn.Embedding):  # its inputs are codes
            continue
        layer.register_buffer(MASK, torch.empty(0))
        layer.register_forward_pre_hook(_multiply)
        shapes[f"{path}.{MASK}"] = shape
    return attrs.evolve(problem, network=network), shapes


def _multiply(layer: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *others = arguments
    return (x * getattr(layer, MASK), *others)


def draw_mask(noise: Noise, out: Tensor, rate: float, sizes: tuple[int, ...] = ()) -> Tensor:
    """Return a mask shaped like `out` ``[k, ...]``: 0 with probability `rate`, else 1/(1-rate).

    A unit is dropped if a standard normal falls below the quantile of `rate`. Overwrites `out`.
    """
    quantile = float(torch.special.ndtri(torch.tensor(rate, dtype=torch.float64)))
    kept = noise.fill(out, sizes) > quantile
    return kept.to(out.dtype).mul_(1 / (1 - rate))
