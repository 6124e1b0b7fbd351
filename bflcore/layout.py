"""Layout: which slice of the flat parameter vector is which tensor, and which are shared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import unknown
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy("torch")

__all__ = ["SHARING", "Layout"]

SHARING = ("all", "body", "head", "none")


@attrs.define(frozen=True, slots=False)
class Layout:
    """The map between a network's named tensors and one flat vector ``[P]``.

    `shared` says for each tensor whether clients share it or keep it (personal). Splitting and
    joining are inverse: ``join(*split(v)) == v``.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shared: tuple[bool, ...]

    @classmethod
    def of(cls, network: nn.Module, head: str = "", sharing: str = "all") -> Layout:
        """Lay out the parameters of `network`; `head` is the module path of its head.

        `sharing` is ``all``, ``body`` (all but the head), ``head`` or ``none``.
        """
        if sharing not in SHARING:
            raise unknown("value of --share:", sharing, SHARING)
        parameters = dict(network.named_parameters())
        parts = ["head" if name.startswith(f"{head}.") else "body" for name in parameters]
        return cls(
            tuple(parameters),
            tuple(tuple(p.shape) for p in parameters.values()),
            tuple(sharing in ("all", part) for part in parts),
        )

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def total(self) -> int:
        """P, the number of parameters."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of the flat vector that each named tensor occupies."""
        entries = zip(self.names, self.sizes, accumulate(self.sizes), strict=True)
        return {name: slice(end - size, end) for name, size, end in entries}

    @cached_property
    def runs(self) -> list[tuple[bool, int]]:
        """Runs of adjacent tensors that are all shared, or all personal: ``(shared, length)``."""
        tensors = zip(self.shared, self.sizes, strict=True)
        return [
            (travels, sum(size for _, size in run))
            for travels, run in groupby(tensors, key=itemgetter(0))
        ]

    @cached_property
    def shared_total(self) -> int:
        """Number of shared parameters."""
        return sum(length for travels, length in self.runs if travels)

    @property
    def personal_total(self) -> int:
        """Number of personal parameters."""
        return self.total - self.shared_total

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the named tensors as one vector ``[P]``."""
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of `vector` ``[P]`` under the tensors' names and shapes."""
        pieces = vector.split(self.sizes)
        return {
            name: piece.view(shape)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Divide ``[..., P]`` into shared and personal parameters: views where they are one run."""
        pieces = vector.split([length for _, length in self.runs], dim=-1)
        return self._gather(pieces, True, vector), self._gather(pieces, False, vector)

    def join(self, shared: Tensor, personal: Tensor) -> Tensor:
        """Put ``[..., P_shared]`` and ``[..., P_personal]`` back together as ``[..., P]``."""
        if self.personal_total == 0:
            return shared
        if self.shared_total == 0:
            return personal
        batch = torch.broadcast_shapes(shared.shape[:-1], personal.shape[:-1])
        pieces = {}
        for kind, half in ((True, shared), (False, personal)):
            lengths = [length for travels, length in self.runs if travels is kind]
            pieces[kind] = iter(half.expand(*batch, half.shape[-1]).split(lengths, dim=-1))
        return torch.cat([next(pieces[travels]) for travels, _ in self.runs], dim=-1)

    def _gather(self, pieces: tuple[Tensor, ...], kind: bool, vector: Tensor) -> Tensor:
        chosen = [p for p, (travels, _) in zip(pieces, self.runs, strict=True) if travels is kind]
        if len(chosen) == 1:
            return chosen[0]
        return torch.cat(chosen, dim=-1) if chosen else vector[..., :0]
