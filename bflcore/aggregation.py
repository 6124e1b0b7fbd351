"""Aggregation: how K posteriors become one.

A rule takes in one client after another: ``start(prior)``, ``add(state, posteriors, weights)`` for
each of them, ``finish(state)``. What it holds in between is a `State`, which a worker or an edge
server can send in place of its clients' posteriors: states of neighbouring clients `merge`.

A plain `Aggregator` collects its clients and fuses them at the end. Most rules are *encode, sum,
decode*: an `AdditiveAggregator` states the two ends and gets streaming in memory independent of K,
any tree of partial sums, and independence of order.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import attrs

from bflcore.errors import OptionError
from bflcore.lazy import lazy
from bflcore.options import Component, component, option
from bflcore.posteriors import ExponentialFamily, Gaussian, Posterior
from bflcore.weighting import check_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = [
    "AdditiveAggregator",
    "Aggregator",
    "Average",
    "CoordinatewiseAggregator",
    "ProductOfChanges",
    "State",
    "Statistics",
    "add_sums",
    "check_posteriors",
    "slices",
    "weighted_sum",
]

Statistics = dict[str, "Tensor"]

# This many coordinates of this many clients are added at a time: 4 MB in float32, so that what is
# computed from them is computed in cache.
COORDINATES, CLIENTS = 16_384, 64


@attrs.frozen(eq=False)
class State:
    """What a rule holds of the clients that it has taken in.

    A worker or an edge server sends only `tensors`: the prior ``[P]`` is part of the broadcast, and
    ``State(prior, tensors)`` at the receiver is the same state.
    """

    prior: Posterior
    tensors: Statistics = attrs.field(factory=dict)

    def chunks(self) -> Iterator[tuple[slice | EllipsisType, State]]:
        """Yield the state over a few coordinates at a time (views; scalars as they are).

        A family whose fields differ in shape is not divided: all of it is one chunk, ``...``.
        """
        mean, fields = self.prior.mean, self.prior.pack().values()
        divisible = all(field.shape == mean.shape for field in fields)
        for chunk in slices(len(mean), COORDINATES) if divisible else (...,):
            tensors = {n: one[chunk] if one.ndim else one for n, one in self.tensors.items()}
            yield chunk, State(self.prior[chunk], tensors)


class Aggregator(Component, abc.ABC):
    """Base of fusion rules; a rule that needs all posteriors at once implements `fuse`.

    Laws (`bflcore.testing.aggregation_laws`): the order of clients never matters, nor in which
    groups they are added and merged, and ``fuse([q]) == q``.
    """

    kind: ClassVar[str] = "aggregator"
    families: ClassVar[tuple[str, ...]] = ()  # posterior families the rule can fuse; empty: any
    weighs: ClassVar[bool] = True  # whether clients' weights matter
    accuracy: ClassVar[float] = 0.0  # relative error of a rule that iterates, beside rounding
    ignores_weights_because: ClassVar[str] = ""  # the reason, of a rule that does not weigh
    # Each is checked by `bflcore.testing.aggregation_laws`.
    known_tags = MappingProxyType(
        {
            "pools": "the scale of weights does not matter; weight zero leaves a client out",
            "adds-evidence": "weights are ignored: every client's knowledge counts in full",
            "robust": "weights are ignored, and a minority of liars cannot move the result far",
            "additive": "the state does not grow with the number of clients",
            "keeps-variance": "identical clients give their common variance",
            "shrinks-variance": "K identical clients of equal weight give a K-th of it",
            "adds-precision": "where a client is certain (variance 0), the certain ones decide",
            "narrow": "the fused variance is at most the weighted mean of the clients'",
            "mixture": "the variance of the means is part of the fused variance",
            "subtracts-prior": "what the clients share through their prior counts once",
            "multiplies-changes": "the fused density is the prior times what each client changed",
        }
    )

    @abc.abstractmethod
    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Fuse posteriors ``[K, P]`` under weights ``[K]`` (any scale) into one ``[P]``.

        `prior` ``[P]`` is what every client started from. Raises `OptionError` for weights that
        are negative, all zero, not finite or of the wrong length, for posteriors of a family that
        is not the prior's or that the rule does not know, and for values that are not finite or
        variances below zero.
        """

    def closed_form(
        self, posteriors: Posterior, weights: Tensor, prior: Posterior
    ) -> Posterior | None:
        """Return what `fuse` must return ``[P]``, computed as the source states it (default: None).

        The conformance kit compares the two on random posteriors ``[K, P]`` of positive variance.
        Law by law, another rule can satisfy the same tags; this says which one it is.
        """
        return None

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor | None:
        """Return how far each client's mean moves the fused one, per unit of its own ``[K, P]``.

        An upper bound, whatever the distance, as the others and all variances stay; None (default):
        nothing is claimed. The conformance kit moves clients and compares.
        """
        return None

    def withstands(self, clients: int, liars: int) -> float:
        """Return how far `liars` of `clients` can move the fused mean, whatever they send.

        It is at most this many times as far from any point as the honest clients are, as points
        (mu, sigma); infinity (default): no bound is claimed.
        """
        return float("inf")

    def start(self, prior: Posterior) -> State:
        """Return the state of no clients."""
        return State(prior)

    def add(self, state: State, posteriors: Posterior, weights: Tensor) -> State:
        """Return the state with more clients ``[K, P]`` in it; `state` may be overwritten.

        By default they are kept as they are, numbered in the order in which they came.
        """
        fields = {**posteriors.pack("posterior."), "weights": weights}
        added = {f"0.{name}": tensor for name, tensor in fields.items()}
        return self.merge(state, State(state.prior, added))

    def merge(self, left: State, right: State) -> State:
        """Combine the states of neighbouring clients, `left` those that come first."""
        first = _count_collected(left)
        merged = dict(left.tensors)
        for name, tensor in right.tensors.items():
            number, _, field = name.partition(".")
            merged[f"{first + int(number)}.{field}"] = tensor
        return State(left.prior, merged)

    def finish(self, state: State) -> Posterior:
        """Return the fused posterior ``[P]``, in the prior's dtype."""
        numbers = range(_count_collected(state))

        def collect(field: str) -> Tensor:
            return torch.cat([state.tensors[f"{number}.{field}"] for number in numbers])

        posteriors = type(state.prior).unpack(
            {name: collect(f"posterior.{name}") for name in state.prior.pack()}
        )
        return self.fuse(posteriors, collect("weights"), state.prior)

    def report(self, state: State) -> dict[str, float]:
        """Return numbers about a fusion that its user should know, by name; by default none."""
        return {}

    def check(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> None:
        """Raise if weights ``[K]`` are invalid or posteriors ``[K, P]`` are of another family."""
        check_weights(weights, len(posteriors.mean))
        known = not self.families or posteriors.name in self.families
        if type(posteriors) is not type(prior) or not known:
            raise OptionError(
                f"posteriors: family {posteriors.name} given to {self.name} with a prior of family "
                f"{prior.name}; allowed: both {' or both '.join(self.families) or 'the same'}"
            )


def _count_collected(state: State) -> int:
    return len(state.tensors) // (len(state.prior.pack()) + 1)


class AdditiveAggregator(Aggregator):
    """Base of rules that are a sum in the right coordinates: a rule states `encode` and `decode`.

    Law: ``fuse(q) == decode(combine(encode(q[:i]), encode(q[i:])))`` for every i.
    """

    @abc.abstractmethod
    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Return the sufficient sums over clients ``[P]``, in float64."""

    @abc.abstractmethod
    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Return the fused posterior ``[P]``, in the prior's dtype."""

    def combine(self, left: Statistics, right: Statistics) -> Statistics:
        """Combine two sums; by default they are added."""
        return add_sums(left, right)

    def add(self, state: State, posteriors: Posterior, weights: Tensor) -> State:
        """Encode the clients and add them to the sums."""
        encoded = self.encode(posteriors, weights, state.prior)
        return self.merge(state, State(state.prior, encoded))

    def merge(self, left: State, right: State) -> State:
        """Combine the sums of neighbouring clients; those of no clients are nothing."""
        if not left.tensors or not right.tensors:
            return left if left.tensors else right
        return State(left.prior, self.combine(left.tensors, right.tensors))

    def finish(self, state: State) -> Posterior:
        """Decode the sums."""
        return self.decode(state.tensors, state.prior)

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Encode, sum, decode to the fused posterior ``[P]``."""
        self.check(posteriors, weights, prior)
        return self.finish(self.add(self.start(prior), posteriors, weights))


class CoordinatewiseAggregator(AdditiveAggregator):
    """Base of additive rules that fuse every coordinate alone.

    `encode` and `decode` are called with some of the coordinates and some of the clients at a time;
    the loops are here, once. `encode` gets weights ``[K]`` in float64 and sums in the clients'
    dtype (`weighted_sum`), the sums themselves are float64: float32 results are right to a few
    roundings whatever K is, and no copy of the posteriors in float64 is ever made. `decode` may
    return any dtype. Neither needs memory beyond a chunk.
    """

    def add(self, state: State, posteriors: Posterior, weights: Tensor) -> State:
        """Add clients to the sums, chunk by chunk and in place."""
        tensors, sound = dict(state.tensors), True
        for chunk, before in state.chunks():
            after, origin = before, before.prior
            for rows in slices(len(weights), CLIENTS):
                few = posteriors[rows, chunk]
                sound &= _is_sound(few)
                sums = self.encode(few, weights[rows].double(), origin)
                after = self.merge(after, State(origin, sums))
            for name, value in after.tensors.items():
                sound &= bool(value.sum().isfinite())
                if value.ndim and name not in tensors:
                    whole = value.shape if chunk is ... else state.prior.mean.shape
                    tensors[name] = value.new_zeros(whole)
                if value.ndim:
                    tensors[name][chunk] = value
                else:
                    tensors[name] = value
        if not sound:  # rare: only now look at every client
            check_posteriors(posteriors)
        return State(state.prior, tensors)

    def finish(self, state: State) -> Posterior:
        """Decode chunk by chunk."""
        fused = state.prior.map(lambda tensor: tensor.new_empty(tensor.shape))
        packed = fused.pack()
        for chunk, part in state.chunks():
            for name, tensor in self.decode(part.tensors, part.prior).pack().items():
                packed[name][chunk] = tensor
        return fused


def _is_sound(posteriors: Posterior) -> bool:
    """Return False if a variance is NaN or below zero: one pass, in cache.

    Other values that are not finite show in the sums, and an infinite variance is a precision of 0.
    """
    variance = posteriors.pack().get("variance")
    return variance is None or not variance.numel() or bool(variance.amin() >= 0)


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `length`; a length of 0 gives one empty slice."""
    for first in range(0, max(length, 1), size):
        yield slice(first, min(first + size, length))


def add_sums(left: Statistics, right: Statistics) -> Statistics:
    """Add sums by name; a sum that only one side has is zero in the other."""
    return {
        name: left[name] + right[name] if name in left and name in right else one
        for name, one in (left | right).items()
    }


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return sum_k w_k values_k ``[...]`` in float64; `weights` ``[K]``, `values` ``[K, ...]``.

    Weights are scaled to at most 1 before they take the dtype of `values`: they may be as small
    or as large as float64 allows.
    """
    largest, shape = weights.max(), values.shape[1:]
    if not bool(largest > 0):
        return values.new_zeros(shape).double()
    scaled = (weights / largest).to(values.dtype)
    return (scaled @ values.flatten(1)).double().mul_(largest).view(shape)


def check_posteriors(posteriors: Posterior, names: Sequence[int] = ()) -> None:
    """Raise if a client's posterior ``[K, P]`` is invalid (see `Posterior.invalid`).

    `names` are the clients' ids, for the message; by default their rows.
    """
    for row, client in enumerate(names or range(len(posteriors.mean))):
        if reason := posteriors[row].invalid():
            raise OptionError(
                f"posteriors: client {client}'s {reason}; allowed: finite numbers, variances >= 0; "
                "leave the client out (the round loop does)"
            )


@component
class Average(CoordinatewiseAggregator):
    """Average the posteriors' parameters (naive weighted average).

    mean = sum w mu, variance = sum w s with weights that sum to one; with ``on = "std"`` standard
    deviations are averaged instead of variances (BPFed, Algorithm 1). Every other field of a
    family is averaged as it is.
    """

    name = "average"
    aliases = ("nwa",)
    reference = "Fischer et al. 2024 (NWA); McMahan et al. 2017 for points"
    families = ()  # any: fields are averaged
    tags = frozenset({"pools", "additive", "keeps-variance", "narrow"})

    on: str = option("variance", "what is averaged beside the mean", choices=("variance", "std"))

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w ``[]`` and, per field ``[P]``: w (mu - mu_0), w s or w sqrt(s), else w field."""
        fields = posteriors.pack()
        if "mean" in fields:
            fields["mean"] = fields["mean"] - prior.mean
        if "variance" in fields and self.on == "std":
            fields["variance"] = fields["variance"].sqrt()
        sums = {name: weighted_sum(weights, field) for name, field in fields.items()}
        return {**sums, "weight": weights.sum()}

    def influence(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Tensor:
        """Return each client's share of all weight ``[K, P]``."""
        return (weights.double() / weights.double().sum())[:, None].expand(posteriors.mean.shape)

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide sums ``[P]`` by the sum of weights."""
        fields = {name: total[name] / total["weight"] for name in prior.pack()}
        if "mean" in fields:
            fields["mean"] = fields["mean"] + prior.mean
        if "variance" in fields and self.on == "std":
            fields["variance"] = fields["variance"].square()
        return prior.unpack(fields)


# Replace variances of 0 in float64: beside a client's no other precision counts, nor the prior's.
CERTAIN, CERTAIN_PRIOR = 1e-150, 1e-120


@component
class ProductOfChanges(CoordinatewiseAggregator):
    """Multiply the prior by what each client changed: q prod_k (q_k / q).

    Natural parameters eta add up: eta = eta_0 + sum_k (eta_k - eta_0), where eta_0 is the prior's,
    which every client started from. Weights are ignored. There is no floor: clients that keep their
    own factors (`bflcore.inference.sites`) send none whose product is improper.
    """

    name = "product-of-changes"
    reference = "Ashman et al. 2022, Algorithm 1; Bui et al. 2018, Algorithm 1"
    families = ("gaussian", "dense-gaussian", "low-rank-gaussian")
    tags = frozenset(
        {"adds-evidence", "additive", "subtracts-prior", "adds-precision", "multiplies-changes"}
    )
    weighs = False
    ignores_weights_because = "every client's change counts in full"

    def add(self, state: State, posteriors: Posterior, weights: Tensor) -> State:
        """Add clients to the sums; those with matrices one by one and in place."""
        if not state.prior.matrices:
            return super().add(state, posteriors, weights)
        tensors, before = dict(state.tensors), _natural(state.prior, CERTAIN_PRIOR)
        for row in range(len(weights)):
            for name, after in _natural(posteriors[row], CERTAIN).items():
                change = after - before[name]
                tensors[name] = tensors[name].add_(change) if name in tensors else change
        if not all(bool(tensor.sum().isfinite()) for tensor in tensors.values()):
            check_posteriors(posteriors)
        return State(state.prior, tensors)

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum eta_k - eta_0 ``[P]``, by natural parameter."""
        before = _natural(prior, CERTAIN_PRIOR)
        return {n: (t - before[n]).sum(0) for n, t in _natural(posteriors, CERTAIN).items()}

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Add eta_0."""
        before = _natural(prior, CERTAIN_PRIOR)
        fused = _exponential(prior).with_natural({n: t + before[n] for n, t in total.items()})
        if not isinstance(fused, Gaussian):
            return fused
        certain = fused.variance.abs() < 2 * CERTAIN
        return Gaussian(fused.mean, fused.variance.masked_fill(certain, 0.0))


def _natural(posterior: Posterior, certain: float) -> dict[str, Tensor]:
    """Return the natural parameters ``[..., P]`` in float64; `certain` replaces variances of 0."""
    if isinstance(posterior, Gaussian):
        variance = posterior.variance.double().clamp_min(certain)
        return Gaussian(posterior.mean.double(), variance).natural()
    exact = _exponential(posterior)
    return exact.map(lambda t: t.double() if t.is_floating_point() else t).natural()


def _exponential(posterior: Posterior) -> ExponentialFamily:
    assert isinstance(posterior, ExponentialFamily), "the registry admits no other"  # noqa: S101
    return posterior
