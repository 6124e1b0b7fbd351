"""Standard normal noise for cohorts, one generator per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Noise"]


class Noise:
    """A source of normals for each client of a cohort; row k is independent of the other rows."""

    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        self._streams = streams

    def fill(self, out: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """Fill the contiguous `out` ``[k, ...]``, row k from client k's generator, and return it.

        With `sizes`, only the first ``sizes[i]`` samples of row i are filled, so that a client
        draws as many numbers as it would alone.
        """
        for row, stream in zip(range(len(out)), self._streams, strict=False):
            (out[row, : sizes[row]] if sizes else out[row]).normal_(generator=stream)
        return out
