"""Aggregation: how K posteriors become one, and how much each client counts.

Most fusion rules are *encode, sum, decode*: an `AdditiveAggregator` states the two ends and gets
streaming in memory independent of K, any tree of partial sums, and independence of order.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from bflcore.errors import OptionError
from bflcore.options import Component, component, option
from bflcore.posteriors import Gaussian, Posterior

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.inference import Broadcast

__all__ = [
    "AdditiveAggregator",
    "Aggregator",
    "Average",
    "Equal",
    "Examples",
    "Statistics",
    "Weighting",
    "check_weights",
]

Statistics = dict[str, "Tensor"]


class Aggregator(Component, abc.ABC):
    """Base of fusion rules.

    Laws (`tests/laws`): the order of clients never matters, and ``fuse([q]) == q``.
    """

    kind: ClassVar[str] = "aggregator"
    families: ClassVar[tuple[str, ...]]  # posterior families the rule can fuse
    tags: ClassVar[frozenset[str]] = frozenset()  # laws claimed: pools, adds-evidence, robust

    @property
    def weighs(self) -> bool:
        """Whether weights matter; rules that add evidence ignore them."""
        return "adds-evidence" not in self.tags

    @abc.abstractmethod
    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Fuse posteriors ``[K, P]`` under weights ``[K]`` (any scale) into one ``[P]``.

        `prior` ``[P]`` is what every client started from. Raises `OptionError` for weights that
        are negative, all zero, not finite or of the wrong length.
        """


class AdditiveAggregator(Aggregator):
    """Base of rules that are a sum in the right coordinates.

    Law: ``fuse(q) == decode(merge(encode(q[:i]), encode(q[i:])))`` for every i.
    """

    @abc.abstractmethod
    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Return the sufficient sums over clients ``[P]``, in float64."""

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        """Combine two partial sums."""
        return {name: left[name] + right[name] for name in left}

    @abc.abstractmethod
    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Return the fused posterior ``[P]``, in the prior's dtype."""

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Encode, sum, decode."""
        check_weights(weights, len(posteriors.mean))
        return self.decode(self.encode(posteriors, weights, prior), prior)


def check_weights(weights: Tensor, clients: int, names: Sequence[int] = ()) -> None:
    """Refuse weights that are not K finite numbers >= 0 with a positive sum.

    `names` are the clients' ids, for the message; by default their rows.
    """
    if tuple(weights.shape) != (clients,):
        raise OptionError(
            f"weights: {tuple(weights.shape)} given for {clients} posteriors; "
            f"allowed: one weight a client, shape ({clients},)"
        )
    for client, weight in zip(names or range(clients), weights.tolist(), strict=True):
        if not (0 <= weight < float("inf")):
            raise OptionError(
                f"weights: {weight} given for client {client}; allowed: a finite number >= 0"
            )
    if clients and not bool(weights.sum() > 0):
        raise OptionError("weights: all are zero; allowed: at least one above 0")


@component
class Average(AdditiveAggregator):
    """Average the posteriors' parameters (naive weighted average).

    mean = sum w mu, variance = sum w s with weights that sum to one; with ``on = "std"`` standard
    deviations are averaged instead of variances (BPFed, Algorithm 1).
    """

    name = "average"
    aliases = ("nwa",)
    reference = "Fischer et al. 2024 (NWA); McMahan et al. 2017 for points"
    families = ("point", "gaussian")
    tags = frozenset({"pools", "additive"})

    on: str = option("variance", "what is averaged beside the mean", choices=("variance", "std"))

    def encode(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Statistics:
        """Sum w, w (mu - mu_0) and w s; differences from the prior keep float32 clients exact."""
        w = weights.double()
        sums = {"weight": w.sum(), "mean": _weighted_sum(w, posteriors.mean, prior.mean)}
        if isinstance(posteriors, Gaussian):
            spread = posteriors.variance if self.on == "variance" else posteriors.variance.sqrt()
            sums["spread"] = _weighted_sum(w, spread)
        return sums

    def decode(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights."""
        dtype = prior.mean.dtype
        mean = (total["mean"] / total["weight"] + prior.mean).to(dtype)
        if not isinstance(prior, Gaussian):
            return type(prior).unpack({"mean": mean})
        spread = total["spread"] / total["weight"]
        return Gaussian(mean, (spread if self.on == "variance" else spread.square()).to(dtype))


def _weighted_sum(weights: Tensor, values: Tensor, origin: Tensor | None = None) -> Tensor:
    """Return sum_k w_k (values_k - origin) ``[P]`` in float64, one client at a time."""
    total = values.new_zeros(values.shape[1:]).double()
    for weight, value in zip(weights.tolist(), values, strict=True):
        total.add_(value.double() if origin is None else value.double() - origin, alpha=weight)
    return total


class Weighting(Component, abc.ABC):
    """Base of weightings: how much each client counts in the fusion."""

    kind: ClassVar[str] = "weighting"
    families: ClassVar[tuple[str, ...]] = ()  # posterior families it can weigh; empty: any
    local: ClassVar[bool] = True  # a client's own result and the broadcast suffice

    @abc.abstractmethod
    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return weights ``[K]`` in float64, of any scale.

        A `local` weighting sees any part of the round's clients at a time; others all of them.
        """


@component
class Examples(Weighting):
    """Weigh each client by its number of training samples."""

    name = "examples"
    reference = "McMahan et al. 2017, Algorithm 1"

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return n_k."""
        return examples.double()


@component
class Equal(Weighting):
    """Weigh all clients equally."""

    name = "equal"
    reference = "Chen et al. 2023 (BPFed), Algorithm 1"

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return ones."""
        return examples.double().new_ones(len(examples))
