"""Groups of weights: the outgoing weights of a neuron, which are kept or pruned together.

A group is a column of a weight matrix: all weights of one input of a layer (for a convolution, of
one input channel). Biases do not belong to a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bflcore import Layout
else:
    torch = lazy("torch")

__all__ = ["Groups"]


class Groups:
    """The group number of each parameter; parameters without a group have the number `count`."""

    def __init__(self, layout: Layout, shared_only: bool = False) -> None:
        numbers, self.count = [], 0
        self.layers: dict[str, slice] = {}  # of the groups, by the name of the weight matrix
        for name, shape, is_shared in zip(layout.names, layout.shapes, layout.shared, strict=True):
            if len(shape) < 2 or (shared_only and not is_shared):
                numbers.append(torch.full(shape, -1).flatten())
                continue
            columns = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
            numbers.append(columns.flatten() + self.count)
            self.layers[name] = slice(self.count, self.count + shape[1])
            self.count += shape[1]
        index = torch.cat(numbers)
        self.index = torch.where(index < 0, self.count, index)
        self.sizes = torch.bincount(self.index, minlength=self.count + 1)

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` ``[K, P]`` within each group: ``[K, count]``."""
        sums = values.new_zeros(len(values), self.count + 1)
        return sums.index_add_(1, self.index.to(values.device), values)[:, : self.count]

    def spread(self, values: Tensor, rest: float) -> Tensor:
        """Return for each parameter ``[K, P]`` its group's value ``[K, count]``, or else `rest`."""
        padded = torch.cat([values, values.new_full((len(values), 1), rest)], dim=1)
        return padded[:, self.index.to(values.device)]

    def mask(self, scores: Tensor, pruned: int) -> Tensor:
        """Return a mask ``[K, P]``: 0 for the `pruned` groups with the lowest scores.

        `scores` ``[K, count]``. Of groups with equal scores the first ones are pruned. Parameters
        without a group are kept.
        """
        lowest = scores.argsort(dim=1, stable=True)[:, :pruned]
        return self.spread(torch.ones_like(scores).scatter_(1, lowest, 0.0), 1.0)

    def ranks(self, scores: Tensor) -> Tensor:
        """Return each group's rank among those of its layer, as a fraction: ``[K, count]``.

        The groups with the lowest fractions are about as many in each layer.
        """
        ranks = torch.empty_like(scores)
        for layer in self.layers.values():
            order = scores[:, layer].argsort(dim=1, stable=True).argsort(dim=1)
            ranks[:, layer] = (order + 0.5).to(scores) / max(1, order.shape[1])
        return ranks

    def moments(self, network: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the number, the sum and the sum of squares of each group's inputs: ``[3, count]``.

        `tensors` are a network's parameters by name, `x` ``[N, ...]`` its samples.
        """
        found = x.new_zeros(3, self.count, dtype=next(iter(tensors.values())).dtype)
        handles = [
            network.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(
                partial(_add_moments, found[:, layer])
            )
            for name, layer in self.layers.items()
        ]
        try:
            torch.func.functional_call(network, dict(tensors), (x,))
        finally:
            for handle in handles:
                handle.remove()
        return found


def _add_moments(found: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Add the moments of a layer's inputs ``[N, C, ...]`` to `found` ``[3, C]``."""
    columns = inputs[0].detach().movedim(1, -1).reshape(-1, found.shape[1])
    found[0] += len(columns)
    found[1] += columns.sum(0)
    found[2] += columns.square().sum(0)
