"""Fast standard normal noise; sampling weights spends most of its time here.

On a CPU, 16 bits of an SFC64 generator select each number from a table of 65,536 quantiles of
N(0, 1), scaled to a variance of exactly one. This is three times faster than an exact generator;
it cuts off the tails beyond 4.3 standard deviations, which hold one draw in 70,000. On a GPU
torch's own generator is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["Noise"]

LEVELS = 1 << 16


class Noise:
    """A source of normals for each client of a cohort; row k is independent of the other rows."""

    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        self._streams = streams
        self._bits = [
            np.random.SFC64(generator.initial_seed())
            for generator in streams
            if generator.device.type == "cpu"
        ]

    def fill(self, out: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """Fill the contiguous `out` ``[k, ...]``, row i from client i's source, and return it.

        With `sizes`, only the first ``sizes[i]`` samples of row i are filled, so that a client
        draws as many numbers as it would alone.
        """
        for row in range(len(out)):
            target = out[row, : sizes[row]] if sizes else out[row]
            if self._bits:
                _look_up(self._bits[row], target)
            else:
                target.normal_(generator=self._streams[row])
        return out


def _look_up(bits: np.random.SFC64, out: Tensor) -> None:
    count = out.numel()
    words = bits.random_raw(-(-count // 4)).view(np.int16)[:count]
    index = torch.from_numpy(words).to(torch.int32).bitwise_and_(LEVELS - 1)
    torch.index_select(_table(out.dtype), 0, index, out=out.view(-1))


@cache
def _table(dtype: torch.dtype) -> Tensor:
    middles = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    quantiles = torch.special.ndtri(middles)
    table: Tensor = quantiles / quantiles.square().mean().sqrt()
    return table.to(dtype)
