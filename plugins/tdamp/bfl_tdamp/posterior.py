"""The posterior family `bernoulli-gaussian`: groups of weights that are zero or Gaussian.

A group is one column of a weight matrix: the outgoing weights of one input neuron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import attrs

from bflcore import Layout, Posterior
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["CERTAIN", "BernoulliGaussian", "groups", "slab_divergence"]

NUMBERS = ("noise", "counted")  # fields with a single number
CERTAIN = 50.0  # absolute log-odds from which a group is kept (or removed) for good


def groups(layout: Layout) -> Layout:
    """Return a layout with one number per group: the columns of every weight matrix, in order."""
    matrices = [i for i, shape in enumerate(layout.shapes) if len(shape) == 2]
    return Layout(
        tuple(layout.names[i] for i in matrices),
        tuple((layout.shapes[i][1],) for i in matrices),
        tuple(layout.shared[i] for i in matrices),
    )


@attrs.frozen(eq=False)
class BernoulliGaussian(Posterior):
    """Every group of weights is zero, or Gaussian with probability sigmoid(log-odds).

    `slab_mean` and `slab_variance` ``[..., P]`` are the moments of the Gaussian; `log_odds`
    ``[..., G]``. Parameters outside matrices do not belong to a group and are always Gaussian. The
    other fields are constants of a round: `centre` ``[..., G]`` is the input around which a layer
    is expanded, z = W (u - centre) + b, so that b is the pre-activation there; `noise`
    ``[..., 1]`` is the variance of the observations; `counted` ``[..., 1]`` is how many times the
    precisions count the data, which every sweep adds again; `shape` ``[..., 2 T]`` holds the rows
    and columns of each of T tensors (columns 0: not a matrix), as floats, since all tensors have
    one dtype.

    Reference: Xu et al. 2024, eq. 3 and 24.
    """

    name = "bernoulli-gaussian"
    structure = ("shape",)

    slab_mean: Tensor
    slab_variance: Tensor
    log_odds: Tensor
    centre: Tensor
    noise: Tensor
    counted: Tensor
    shape: Tensor

    @classmethod
    def of(
        cls,
        layout: Layout,
        mean: Tensor,
        variance: Tensor,
        log_odds: Tensor,
        centre: Tensor,
        noise: float = 1.0,
    ) -> BernoulliGaussian:
        """Return a posterior over `layout`.

        `mean` and `variance` ``[..., P]``; `log_odds` and `centre` ``[..., G]``.
        """
        sides = [
            side
            for shape, size in zip(layout.shapes, layout.sizes, strict=True)
            for side in (shape if len(shape) == 2 else (size, 0))
        ]
        batch = mean.shape[:-1]
        one = mean.new_ones((*batch, 1))
        shape = mean.new_tensor(sides).expand(*batch, -1).clone()
        return cls(mean, variance, log_odds, centre, noise * one, 0 * one, shape)

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> BernoulliGaussian:
        """Return random slabs and log-odds with a fixed centre, in float64."""

        def normal(size: int) -> Tensor:
            return torch.randn(clients, size, generator=noise, dtype=torch.float64)

        total, count = layout.total, groups(layout).total
        centre = torch.linspace(-1, 1, count, dtype=torch.float64).expand(clients, -1).clone()
        return cls.of(layout, normal(total), normal(total).exp(), normal(count), centre)

    @property
    def mean(self) -> Tensor:
        """Posterior mean rho mu ``[..., P]``."""
        return self.moments()[0]

    @property
    def probability(self) -> Tensor:
        """Probability that a group is not zero ``[..., G]``."""
        return self.log_odds.sigmoid()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return means rho mu and variances rho s + rho (1 - rho) mu^2 ``[..., P]``."""
        rho = self.spread(self.probability, 1.0)
        mean = rho * self.slab_mean
        return mean, rho * self.slab_variance + (1 - rho) * mean * self.slab_mean

    def once(self, first: Tensor) -> Self:
        """Return the posterior whose precisions count the data once; the means are the same.

        `first` ``[..., P]`` is the variance before any data.
        """
        before = 1 / first
        gain = (1 / self.slab_variance - before) / self.counted.clamp_min(1)
        return attrs.evolve(self, slab_variance=1 / (before + gain.clamp_min(0)))

    def spread(self, values: Tensor, other: float) -> Tensor:
        """Return for each parameter ``[..., P]`` its group's value ``[..., G]``, else `other`."""
        pieces, start = [], 0
        for rows, columns in self.sides():
            if columns:
                group = values[..., None, start : start + columns]
                pieces.append(group.expand(*values.shape[:-1], rows, columns).flatten(-2))
                start += columns
            else:
                pieces.append(values.new_full((*values.shape[:-1], rows), other))
        return torch.cat(pieces, -1) if pieces else values[..., :0]

    def per_group(self, values: Tensor) -> Tensor:
        """Sum over the parameters of each group: ``[..., P]`` -> ``[..., G]``."""
        sizes = [rows * max(columns, 1) for rows, columns in self.sides()]
        pieces = [
            piece.unflatten(-1, (rows, columns)).sum(-2)
            for piece, (rows, columns) in zip(values.split(sizes, -1), self.sides(), strict=True)
            if columns
        ]
        return torch.cat(pieces, -1) if pieces else values[..., :0]

    def by_matrix(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split one number per group ``[..., G]`` by matrix."""
        counts = [columns for _, columns in self.sides() if columns]
        pieces: tuple[Tensor, ...] = values.split(counts, -1)
        return pieces

    def sides(self) -> list[tuple[int, int]]:
        """Return the rows and columns of every tensor (the same at all clients)."""
        numbers = [round(float(side)) for side in self.shape.reshape(-1, self.shape.shape[-1])[0]]
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def split(self, layout: Layout) -> tuple[Self, Self]:
        """Split into shared and personal tensors; both halves keep noise and count."""
        halves = [
            (tensor, tensor) if name in NUMBERS else _layout_of(layout, name).split(tensor)
            for name, tensor in self.pack().items()
        ]
        names = self._fields()
        return (
            self.unpack(dict(zip(names, (shared for shared, _ in halves), strict=True))),
            self.unpack(dict(zip(names, (personal for _, personal in halves), strict=True))),
        )

    def join(self, personal: Self, layout: Layout) -> Self:
        """Join both halves; noise and count are those of the shared half."""
        mine, theirs = self.pack(), personal.pack()
        whole = {
            name: _layout_of(layout, name).join(mine[name], theirs[name])
            for name in mine
            if name not in NUMBERS
        }
        batch = torch.broadcast_shapes(self.noise.shape, personal.noise.shape)
        return self.unpack(whole | {name: mine[name].expand(batch) for name in NUMBERS})

    def invalid(self) -> str | None:
        """Return why this is not a valid posterior (such as a variance that is not positive)."""
        if reason := super().invalid():
            return reason
        for name in ("slab_variance", "noise"):
            tensor = getattr(self, name)
            if bool((tensor <= 0).any()):
                return f"{name} is not above 0"
            least = torch.finfo(tensor.dtype).tiny  # below it an inverse overflows
            if bool((tensor < least).any()):
                return f"{name} is below {least:.3g}"
        return None

    def sample(self, noise: Tensor) -> Tensor:
        """Return parameters ``[..., P]``, with some groups zero and the others Gaussian.

        A group is kept if its first normal z satisfies u = Phi(z) < rho; Phi^-1(u / rho) is then
        standard normal again and replaces z.
        """
        sizes = [rows * max(columns, 1) for rows, columns in self.sides()]
        pieces, start = [], 0
        for piece, (rows, columns) in zip(noise.split(sizes, -1), self.sides(), strict=True):
            if not columns:
                pieces.append(piece)
                continue
            block = piece.unflatten(-1, (rows, columns))
            rho = self.probability[..., start : start + columns]
            u = torch.special.ndtr(block[..., 0, :])
            tiny = torch.finfo(noise.dtype).tiny
            eps = torch.finfo(noise.dtype).eps
            first = torch.special.ndtri((u / rho.clamp_min(tiny)).clamp(tiny, 1 - eps))
            block = torch.cat([first[..., None, :], block[..., 1:, :]], -2)
            # NaN marks removed groups; it becomes zero below.
            block = block.masked_fill((u >= rho)[..., None, :], float("nan"))
            pieces.append(block.flatten(-2))
            start += columns
        drawn = self.slab_mean + self.slab_variance.sqrt() * torch.cat(pieces, -1)
        return drawn.nan_to_num(0.0)

    def kl(self, other: BernoulliGaussian) -> Tensor:
        """Return KL(self || other) ``[...]``: the Bernoullis' plus rho times the slabs'."""
        logsigmoid = torch.nn.functional.logsigmoid
        rho = self.probability
        bernoulli = rho * (logsigmoid(self.log_odds) - logsigmoid(other.log_odds))
        bernoulli = bernoulli + (1 - rho) * (
            logsigmoid(-self.log_odds) - logsigmoid(-other.log_odds)
        )
        slabs = self.spread(rho, 1.0) * slab_divergence(self, other)
        return bernoulli.sum(-1).clamp_min(0) + slabs.sum(-1)


def slab_divergence(q: BernoulliGaussian, p: BernoulliGaussian) -> Tensor:
    """Return the KL divergence between the slabs of each parameter ``[..., P]``."""
    ratio = q.slab_variance / p.slab_variance
    shift = (q.slab_mean - p.slab_mean).square() / p.slab_variance
    return 0.5 * (ratio - ratio.log() - 1 + shift)


def _layout_of(layout: Layout, field: str) -> Layout:
    if field in {"log_odds", "centre"}:
        return groups(layout)
    if field == "shape":
        return Layout(layout.names, tuple((2,) for _ in layout.names), layout.shared)
    return layout
