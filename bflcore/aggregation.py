"""Aggregation: how K posteriors become one, and how much each client counts.

Most fusion rules are *encode, sum, decode*: an `AdditiveAggregator` states the two ends and gets
streaming in memory independent of K, any tree of partial sums, and independence of order.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from bflcore.errors import OptionError
from bflcore.options import Component, component, option
from bflcore.posteriors import Gaussian, Point, Posterior
from bflcore.weighting import check_weights

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "AdditiveAggregator",
    "Aggregator",
    "Average",
    "CoordinatewiseAggregator",
    "Statistics",
    "block_by_block",
    "blocks",
    "check_posteriors",
    "weighted_sum",
]

Statistics = dict[str, "Tensor"]

# The fusion loop takes this many coordinates of this many clients at a time: 4 MB in float32, so
# that what is computed from a block is computed in cache.
COORDINATES, CLIENTS = 16_384, 64


class Aggregator(Component, abc.ABC):
    """Base of fusion rules.

    Laws (`tests/laws`): the order of clients never matters, and ``fuse([q]) == q``.
    """

    kind: ClassVar[str] = "aggregator"
    families: ClassVar[tuple[str, ...]]  # posterior families the rule can fuse; empty: any
    # Laws claimed, checked by `bflcore.testing.aggregation_laws`:
    # pools             the scale of weights is nothing, a client of weight zero is absent
    # adds-evidence     weights are ignored: every client's knowledge counts in full
    # robust            weights are ignored, and a minority of liars cannot move the result far
    # additive          any tree of partial sums gives the same
    # keeps-variance    identical clients give their common variance
    # shrinks-variance  K identical clients of equal weight give a K-th of it
    # adds-precision    where a client is certain (variance 0), the certain ones decide
    # narrow            the fused variance is at most the weighted mean of the clients'
    # mixture           the variance of the means is part of the fused variance
    # subtracts-prior   what the clients share through their prior counts once
    tags: ClassVar[frozenset[str]] = frozenset()

    @property
    def weighs(self) -> bool:
        """Whether weights matter; rules that add evidence and robust rules ignore them."""
        return not self.tags & {"adds-evidence", "robust"}

    @abc.abstractmethod
    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Fuse posteriors ``[K, P]`` under weights ``[K]`` (any scale) into one ``[P]``.

        `prior` ``[P]`` is what every client started from. Raises `OptionError` for weights that
        are negative, all zero, not finite or of the wrong length, for posteriors of a family that
        is not the prior's or that the rule does not know, and for values that are not finite or
        variances below zero.
        """

    def check(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> None:
        """Refuse weights that make no sense, and posteriors of another family."""
        check_weights(weights, len(posteriors.mean))
        known = not self.families or posteriors.name in self.families
        if type(posteriors) is not type(prior) or not known:
            raise OptionError(
                f"posteriors: family {posteriors.name} given to {self.name} with a prior of family "
                f"{prior.name}; allowed: both {' or both '.join(self.families) or 'the same'}"
            )


class AdditiveAggregator(Aggregator):
    """Base of rules that are a sum in the right coordinates.

    Law: ``fuse(q) == decode(merge(encode(q[:i]), encode(q[i:])))`` for every i.
    """

    @abc.abstractmethod
    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Return the sufficient sums over clients ``[P]``, in float64."""

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        """Combine two partial sums; a sum that only one of them has is zero in the other."""
        return {
            name: left[name] + right[name] if name in left and name in right else one
            for name, one in (left | right).items()
        }

    def accumulate(
        self, total: Statistics, posteriors: Posterior, weights: Tensor, prior: Posterior
    ) -> Statistics:
        """Return `total` (empty at first) with more clients in it; `total` may be changed."""
        encoded = self.encode(posteriors, weights, prior)
        return self.merge(total, encoded) if total else encoded

    @abc.abstractmethod
    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Return the fused posterior ``[P]``, in the prior's dtype."""

    def report(self, total: Statistics, prior: Posterior) -> dict[str, float]:
        """Return figures of a fusion that its user should know of, by name; by default none."""
        return {}

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Encode, sum, decode."""
        self.check(posteriors, weights, prior)
        return self.decode(self.encode(posteriors, weights, prior), prior)


class CoordinatewiseAggregator(AdditiveAggregator):
    """Base of additive rules that fuse every coordinate alone.

    A rule states the sums of a block and what is fused of them; the loops over blocks are here,
    once. Within a block numbers keep the clients' dtype, from block to block sums are float64:
    float32 results are right to a few roundings whatever K is, and no copy of the posteriors in
    float64 is ever made. Adding a client and decoding a total need no memory beyond a block.
    """

    @abc.abstractmethod
    def sums(self, weights: Tensor, *fields: Tensor) -> Statistics:
        """Return sums over the clients of a block, each ``[B]`` or a scalar, in float64.

        `weights` ``[K]`` in float64; `fields` ``[K, B]`` are the posterior's, in order, the mean
        as its difference from the prior's. `weighted_sum` sums a field. The differences are
        scratch, to be overwritten freely; the other fields are the clients' own.
        """

    @abc.abstractmethod
    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Return the fused posterior of a block ``[B]`` from its sums, in any dtype."""

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Decode block by block."""
        fused = prior.map(lambda tensor: tensor.new_empty(tensor.shape))
        packed = fused.pack()
        for part, sums, origin in block_by_block(total, prior):
            for name, tensor in self.fused(sums, origin).pack().items():
                packed[name][part] = tensor
        return fused

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum block by block."""
        return self.accumulate({}, posteriors, weights, prior)

    def accumulate(
        self, total: Statistics, posteriors: Posterior, weights: Tensor, prior: Posterior
    ) -> Statistics:
        """Add clients to `total`, block by block and in place."""
        packed = posteriors.pack()
        mean, others = packed.pop("mean"), tuple(packed.values())
        vectors = {name: tensor for name, tensor in total.items() if tensor.ndim}
        scalars = {name: tensor for name, tensor in total.items() if not tensor.ndim}
        after, sound = dict(scalars), True
        for part in blocks(mean.shape[1], COORDINATES):
            sums = scalars | {name: vectors[name][part] for name in vectors} if scalars else {}
            for rows in blocks(len(mean), CLIENTS):
                shift = mean[rows, part] - prior.mean[part]
                rest = [field[rows, part] for field in others]
                sound &= all(_is_sound(field) for field in rest)
                block = self.sums(weights[rows].double(), shift, *rest)
                sums = self.merge(sums, block) if sums else block
            sound &= all(bool(value.sum().isfinite()) for value in sums.values())
            for name, value in sums.items():
                if not value.ndim:
                    after[name] = value
                    continue
                if name not in vectors:
                    vectors[name] = value.new_zeros(mean.shape[1])
                vectors[name][part] = value
        if not sound:  # seldom: only now is it worth a look at every client
            check_posteriors(posteriors)
        return after | vectors


def _is_sound(block: Tensor) -> bool:
    """Return False where a block holds NaN or a number below zero: one pass, in cache.

    Infinity shows in the sums, but for an infinite variance among precisions: it counts nothing.
    """
    return not block.numel() or bool(block.amin() >= 0)


def blocks(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `length`; of nothing, one empty slice."""
    for first in range(0, max(length, 1), size):
        yield slice(first, min(first + size, length))


def block_by_block(
    total: Statistics, prior: Posterior
) -> Iterator[tuple[slice, Statistics, Posterior]]:
    """Yield every block's coordinates, its sums (views; scalars as they are) and its prior."""
    for part in blocks(len(prior.mean), COORDINATES):
        sums = {name: one[part] if one.ndim else one for name, one in total.items()}
        yield part, sums, prior[part]


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return sum_k w_k values_k ``[B]`` in float64; `weights` ``[K]``, `values` ``[K, B]``.

    Weights are scaled to at most 1 before they take the dtype of `values`: they may be as small
    or as large as float64 allows.
    """
    largest = weights.max()
    if not bool(largest > 0):
        return values.new_zeros(values.shape[1:]).double()
    return ((weights / largest).to(values.dtype) @ values).double().mul_(largest)


def check_posteriors(posteriors: Posterior, names: Sequence[int] = ()) -> None:
    """Refuse posteriors ``[K, P]`` of which one is none (see `Posterior.fault`).

    `names` are the clients' ids, for the message; by default their rows.
    """
    for row, client in enumerate(names or range(len(posteriors.mean))):
        if fault := posteriors[row].fault():
            raise OptionError(
                f"posteriors: client {client}'s {fault}; allowed: finite numbers, variances >= 0; "
                "leave the client out (the round loop does)"
            )


@component
class Average(CoordinatewiseAggregator):
    """Average the posteriors' parameters (naive weighted average).

    mean = sum w mu, variance = sum w s with weights that sum to one; with ``on = "std"`` standard
    deviations are averaged instead of variances (BPFed, Algorithm 1). Of other families every
    field is averaged, whatever its length.
    """

    name = "average"
    aliases = ("nwa",)
    reference = "Fischer et al. 2024 (NWA); McMahan et al. 2017 for points"
    families = ()  # any: fields are averaged
    tags = frozenset({"pools", "additive", "keeps-variance", "narrow"})

    on: str = option("variance", "what is averaged beside the mean", choices=("variance", "std"))

    def accumulate(
        self, total: Statistics, posteriors: Posterior, weights: Tensor, prior: Posterior
    ) -> Statistics:
        """Add clients to `total`: coordinate by coordinate, or field by field."""
        if isinstance(prior, Gaussian | Point):
            return super().accumulate(total, posteriors, weights, prior)
        w = weights.double()
        sums = {
            name: weighted_sum(w, field.double().flatten(1)).view(field.shape[1:])
            for name, field in posteriors.pack().items()
        }
        return self.merge(total, {**sums, "weight": w.sum()})

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Return the averages in the prior's dtype."""
        if isinstance(prior, Gaussian | Point):
            return super().decode(total, prior)
        dtypes = {name: field.dtype for name, field in prior.pack().items()}
        return prior.unpack(
            {name: (total[name] / total["weight"]).to(dtypes[name]) for name in dtypes}
        )

    def sums(self, weights: Tensor, *fields: Tensor) -> Statistics:
        """Sum w, w (mu - mu_0), and w s or w sqrt(s)."""
        shift, *rest = fields
        sums = {"weight": weights.sum(), "mean": weighted_sum(weights, shift)}
        if rest:
            spread = rest[0] if self.on == "variance" else rest[0].sqrt()
            sums["spread"] = weighted_sum(weights, spread)
        return sums

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights."""
        mean = total["mean"] / total["weight"] + prior.mean
        if not isinstance(prior, Gaussian):
            return type(prior).unpack({"mean": mean})
        spread = total["spread"] / total["weight"]
        return Gaussian(mean, spread if self.on == "variance" else spread.square())
