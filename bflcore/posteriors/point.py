"""Point estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore.posteriors.base import Posterior

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Point"]


@attrs.frozen(eq=False)
class Point(Posterior):
    """A point estimate: all mass on one value.

    `mean` ``[..., P]``.
    """

    name = "point"

    mean: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Return the point, whatever the noise."""
        return self.mean.expand_as(noise)

    def kl(self, other: Point) -> Tensor:
        """Return 0 where the points coincide and infinity elsewhere ``[...]``."""
        equal = (self.mean == other.mean).all(-1)
        return (~equal).to(self.mean.dtype).masked_fill(~equal, float("inf"))
