"""Posterior families: what a client knows about each parameter.

A posterior is a frozen class of tensors whose last axis is the parameters ``P`` and whose leading
axis, where present, is the client ``K``. Variances are stored and sent, never standard deviations.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import attrs

from bflcore.lazy import lazy
from bflcore.options import Component

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.layout import Layout
else:
    torch = lazy("torch")

__all__ = ["ExponentialFamily", "Gaussian", "Point", "Posterior"]


class Posterior(Component, abc.ABC):
    """Base of posterior families.

    The law of packing: ``type(q).unpack(q.pack()) == q``.
    """

    kind: ClassVar[str] = "posterior"
    # Fields that describe the network's structure and not a parameter: they are equal at every
    # client and in the prior, and fusion does not change them.
    structure: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # every family has a mean, as a field or as a property

        @property
        def mean(self) -> Tensor:
            """Posterior mean ``[..., P]``."""

    def pack(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors ``[..., P]`` by field name, each with `prefix`."""
        return {prefix + name: getattr(self, name) for name in self._fields()}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Self:
        """Rebuild a posterior from the tensors ``[..., P]`` that `pack` returned."""
        return cls(**{name: tensors[prefix + name] for name in cls._fields()})

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor ``[..., P]``."""
        return self.unpack({name: function(tensor) for name, tensor in self.pack().items()})

    def __getitem__(self, clients: Any) -> Self:
        """Select along the client axis."""
        return self.map(lambda tensor: tensor[clients])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join posteriors along the client axis they already have."""
        packed = [part.pack() for part in parts]
        return cls.unpack({name: torch.cat([p[name] for p in packed]) for name in packed[0]})

    def split(self, layout: Layout) -> tuple[Self, Self]:
        """Divide into the posterior over shared and the one over personal coordinates."""
        return self.map(lambda t: layout.split(t)[0]), self.map(lambda t: layout.split(t)[1])

    def join(self, personal: Self, layout: Layout) -> Self:
        """Put the shared coordinates (`self`) and the personal ones back together."""
        mine, theirs = self.pack(), personal.pack()
        return self.unpack({name: layout.join(mine[name], theirs[name]) for name in mine})

    def invalid(self) -> str | None:
        """Return why these tensors are not a posterior of the family; None if they are.

        Called on one client's posterior ``[P]`` before it may touch the server.
        """
        for name, tensor in self.pack().items():
            if not bool(tensor.isfinite().all()):
                return f"{name} is not finite"
        return None

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> Self:
        """Return valid posteriors ``[clients, P]`` in float64 that differ in every field.

        The conformance kit tests families with these. By default every field is standard normal.
        """
        size = (clients, layout.total)
        return cls.unpack({name: _normal(size, noise) for name in cls._fields()})

    def combinations(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the means and variances ``[M]`` of linear combinations of the parameters.

        `matrix` ``[M, P]``; of one posterior ``[P]``. The default, None, is for families that do
        not say how uncertain a parameter is.
        """
        return matrix @ self.mean, None

    def log_density(self, parameters: Tensor) -> Tensor:
        """Return log q(parameters) in nats ``[...]``; families without a density have none."""
        raise NotImplementedError(f"{self.name} has no density")

    @abc.abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Return parameters ``[..., P]`` for standard normal `noise` ``[..., P]``."""

    @abc.abstractmethod
    def kl(self, other: Self) -> Tensor:
        """Return KL(self || other) in nats, summed over parameters: ``[...]``."""

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in attrs.fields(cast("Any", cls)))


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


class ExponentialFamily(Posterior):
    """Base of families whose densities multiply by adding natural parameters.

    The laws: ``from_natural(q.natural()) == q``, and the log density of a product is, up to a
    constant, that of the sum of the factors' natural parameters. A difference of natural parameters
    is a *factor*, which need not be a posterior: its precision may be zero or negative.
    """

    @abc.abstractmethod
    def natural(self) -> dict[str, Tensor]:
        """Return the natural parameters by name, each ``[..., P]`` or ``[..., P, P]``."""

    @classmethod
    @abc.abstractmethod
    def from_natural(cls, natural: Mapping[str, Tensor]) -> Self:
        """Return the posterior ``[..., P]`` with these natural parameters."""


@attrs.frozen(eq=False)
class Gaussian(ExponentialFamily):
    """A Gaussian with a mean and a variance for each parameter (mean field).

    `mean` and `variance` ``[..., P]``; a variance may be zero (a coordinate known for certain).
    """

    name = "gaussian"

    mean: Tensor
    variance: Tensor

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> Gaussian:
        """Return means around 0 and variances around 1."""
        size = (clients, layout.total)
        return cls(_normal(size, noise), _normal(size, noise).exp())

    def combinations(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and variances ``[M]`` of combinations ``[M, P]`` of the parameters."""
        return matrix @ self.mean, matrix.square() @ self.variance

    def natural(self) -> dict[str, Tensor]:
        """Return the precision 1/s and the shift mean/s ``[..., P]``."""
        precision = self.variance.reciprocal()
        return {"precision": precision, "shift": precision * self.mean}

    @classmethod
    def from_natural(cls, natural: Mapping[str, Tensor]) -> Gaussian:
        """Return the Gaussian with a precision and a shift ``[..., P]``."""
        variance = natural["precision"].reciprocal()
        return cls(natural["shift"] * variance, variance)

    def log_density(self, parameters: Tensor) -> Tensor:
        """Return the sum over coordinates of log N(parameter; mean, variance)."""
        squares = (parameters - self.mean).square() / self.variance
        return -0.5 * (squares + self.variance.log() + math.log(2 * math.pi)).sum(-1)

    def invalid(self) -> str | None:
        """Return why this is not a Gaussian: not finite, a variance below 0 or not invertible."""
        if reason := super().invalid():
            return reason
        if bool((self.variance < 0).any()):
            return "variance is negative"
        least = torch.finfo(self.variance.dtype).tiny  # below it an inverse overflows
        lost = (self.variance > 0) & (self.variance < least)
        return f"variance is below {least:.3g}, but not 0" if bool(lost.any()) else None

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + sqrt(variance) * noise ``[..., P]``."""
        return self.mean + self.variance.sqrt() * noise

    def kl(self, other: Gaussian) -> Tensor:
        """Return KL(self || other) ``[...]`` in closed form.

        Per coordinate: log(s'/s)/2 + (s + (mu - mu')^2) / (2 s') - 1/2. Two certain and equal
        coordinates contribute nothing; to a certain coordinate any other is infinitely far.
        """
        ratio = self.variance / other.variance
        shift = (self.mean - other.mean).square() / other.variance
        terms = 0.5 * (ratio - ratio.log() - 1 + shift)
        same = (self.variance == other.variance) & (self.mean == other.mean)
        certain = other.variance == 0
        return terms.masked_fill(certain, float("inf")).masked_fill(same, 0.0).sum(-1)


def _normal(size: tuple[int, int], noise: torch.Generator) -> Tensor:
    return torch.randn(size, generator=noise, dtype=torch.float64)
