"""Weight noise of which one draw serves several steps.

Drawing a normal number for every parameter takes longer than all other arithmetic of a step. Each
step therefore reads a *window* of a tape that is twice as long as the parameters, at a random place
and with a random sign. The noise of a step is exactly standard normal and independent from
parameter to parameter. Given all earlier steps its expectation is zero, and a parameter meets a
number again only if the same place is drawn twice; but numbers return at other parameters. A tape
for a few parameters would have few places, and drawing for them costs little: they get new noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["FEW", "WindowedNoise"]

FEW = 16_384  # parameters; fewer get new noise in each step


class WindowedNoise:
    """A source of normals for each client of a cohort; row k is independent of the other rows.

    A tape serves `windows` steps; with 1, every step has new noise. `like` ``[K, P]``.
    """

    def __init__(self, streams: Sequence[torch.Generator], like: Tensor, windows: int) -> None:
        length = like.shape[1]
        windows = windows if length >= FEW else 1
        self._streams, self._windows, self._length = streams, windows, length
        self._tapes = like.new_empty(len(like), length if windows == 1 else 2 * length)
        self._places: list[list[int]] = []  # of each client's next windows
        self._left = 0  # windows of these tapes

    def rows(self, k: int) -> list[tuple[Tensor, int]]:
        """Return normals ``[P]`` for each of the first k clients, and the sign to give them.

        The tensors are parts of the tapes: they must not be changed.
        """
        if self._windows == 1:
            pairs = zip(self._tapes[:k], self._streams, strict=False)
            return [(tape.normal_(generator=stream), 1) for tape, stream in pairs]
        if not self._left:
            self._left = self._windows
            self._places = [self._draw(row) for row in range(k)]
        self._left -= 1
        rows: list[tuple[Tensor, int]] = []
        for tape, places in zip(self._tapes[:k], self._places, strict=False):
            start, negative = divmod(places.pop(), 2)
            rows.append((tape[start : start + self._length], -1 if negative else 1))
        return rows

    def _draw(self, row: int) -> list[int]:
        """Draw a client's tape, and return the places of its windows and their signs."""
        stream, places = self._streams[row], 2 * (self._length + 1)
        self._tapes[row].normal_(generator=stream)
        size = (self._windows,)
        return torch.randint(places, size, generator=stream, device=stream.device).tolist()
