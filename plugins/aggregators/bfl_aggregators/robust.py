"""Robust rules, which a minority of clients cannot move far: order statistics and medians."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bflcore import Aggregator, Posterior, component, option
from bflcore.aggregation import COORDINATES, check_posteriors, slices
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    np, torch = lazy("numpy"), lazy("torch")

__all__ = ["GeometricMedian", "Median", "TrimmedMean", "TrimmedPrecisionWeightedMean"]

CONVERGED = 1e-12  # change of a share at which the Weiszfeld steps end
DIGITS = 9  # of a share: it must not depend on the order of clients, in which sums are rounded
UNVERIFIED = "the number of samples that a client claims cannot be verified"


@component
class Median(Aggregator):
    """Take the median over clients of each parameter's mean and of its variance.

    Disagreement between clients does not widen the result. Weights are ignored, since a client
    could claim any number of samples. For an even number of clients, the middle two are averaged.
    """

    name = "median"
    reference = "Yin et al. 2018, Algorithm 1, option I"
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})
    weighs = False
    ignores_weights_because = UNVERIFIED

    def withstands(self, clients: int, liars: int) -> float:
        """Return 1 for a minority: the middle values lie between those of honest clients."""
        return 1.0 if 2 * liars < clients else float("inf")

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Trim all but the middle one or two values."""
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        cut = (len(weights) - 1) // 2
        return posteriors.map(lambda field: _trimmed_mean(field, cut))


@component
class TrimmedMean(Aggregator):
    """Average each parameter over clients without the extreme values.

    The ``floor(fraction * K)`` smallest and as many of the largest of K values are left out, for
    means and variances separately. Weights are ignored, as in `median`.
    """

    name = "trimmed-mean"
    reference = "Yin et al. 2018, Algorithm 1, option II"
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})
    weighs = False
    ignores_weights_because = UNVERIFIED

    fraction: float = option(
        0.1, "fraction of the clients left out at either end", at_least=0, below=0.5
    )

    def withstands(self, clients: int, liars: int) -> float:
        """Return 1 for as many as are left out at either end: the rest lie between honest ones."""
        return 1.0 if liars <= _cut(self.fraction, clients) else float("inf")

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Trim both ends."""
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        cut = _cut(self.fraction, len(weights))
        return posteriors.map(lambda field: _trimmed_mean(field, cut))


@component
class TrimmedPrecisionWeightedMean(Aggregator):
    """Weigh means by precision, with extreme means and precisions cut to those of most clients.

    Per parameter, with c = ``floor(fraction * K)``: means and precisions are clamped to the values
    of rank c + 1 and K - c. (To leave the extremes out would make the result jump where means tie.)
    Then mean = sum(mu/s) / sum(1/s), and 1/variance is the mean precision. A client thus gains
    nothing by claiming to be more certain than most. Weights are ignored, as in `median`.
    """

    name = "trimmed-precision-weighted-mean"
    aliases = ("tpwm",)
    reference = "after Yin et al. 2018, Algorithm 1, option II; means weighed as in a product"
    families = ("gaussian",)
    tags = frozenset({"robust", "keeps-variance"})
    weighs = False
    ignores_weights_because = UNVERIFIED

    fraction: float = option(
        0.1, "fraction of the clients left out at either end", at_least=0, below=0.5
    )

    def withstands(self, clients: int, liars: int) -> float:
        """Return 1 for as many as are clamped at either end: to values between honest ones."""
        return 1.0 if liars <= _cut(self.fraction, clients) else float("inf")

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Sort the means of each parameter, and their variances."""
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        cut = _cut(self.fraction, len(weights))
        fused = prior.map(lambda tensor: tensor.new_empty(tensor.shape))
        packed, given = fused.pack(), posteriors.pack()
        for chunk in slices(len(prior.mean), COORDINATES):
            mean, variance = (
                given[name][:, chunk].T.cpu().double().numpy() for name in ("mean", "variance")
            )
            found = _precision_weighted(mean, variance, cut)
            for name, values in zip(("mean", "variance"), found, strict=True):
                packed[name][chunk] = torch.from_numpy(values)
        return fused


@component
class GeometricMedian(Aggregator):
    """Take the Gaussian with the smallest sum of 2-Wasserstein distances to the clients'.

    Diagonal Gaussians are points (mu, sigma), and their distance is Euclidean: the root of the sum
    over parameters of (mu - mu')^2 + (sigma - sigma')^2. Standard deviations are thus fused like
    means. The median is smoothed: no distance counts as less than `smoothing` times the typical
    distance between clients. All parameters of a client are weighed alike: unlike `median` and
    `trimmed-mean`, it returns a convex combination of the clients. Weights are ignored.
    """

    name = "geometric-median"
    aliases = ("rfa",)
    reference = "Pillutla, Kakade & Harchaoui 2022 (RFA), Algorithm 2; Weiszfeld 1937"
    accuracy = 1e-6
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})
    weighs = False
    ignores_weights_because = UNVERIFIED

    smoothing: float = option(
        1e-6, "least distance, as a fraction of the typical distance between clients", above=0
    )
    iterations: int = option(1000, "largest number of Weiszfeld steps", at_least=1)

    def withstands(self, clients: int, liars: int) -> float:
        """Return (1 - a) / sqrt(1 - 2 a) for a minority a (Minsker 2015, Lemma 2.1)."""
        share = liars / clients
        return (1 - share) / (1 - 2 * share) ** 0.5 if 2 * liars < clients else float("inf")

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Find each client's share, from the distances between clients alone; then average."""
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        clients = len(weights)
        share = weights.new_full((clients,), 1 / clients, dtype=torch.float64)
        for _ in range(2):  # the second time about a centre near most clients: no cancellation
            apart = _squared_distances(posteriors, share)
            share = _weiszfeld(apart, self.smoothing, self.iterations)
        fused = prior.map(lambda tensor: tensor.new_empty(tensor.shape))
        for chunk, points in _points(posteriors):
            for name, values in points.items():
                centre = share @ values
                fused.pack()[name][chunk] = centre.square() if name == "variance" else centre
        return fused


def _points(posteriors: Posterior) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yield means and standard deviations ``[K, P]``, some parameters at a time, in float64."""
    for chunk in slices(posteriors.mean.shape[-1], COORDINATES):
        fields = {name: t[:, chunk].double() for name, t in posteriors.pack().items()}
        if "variance" in fields:
            fields["variance"] = fields["variance"].sqrt()
        yield chunk, fields


def _squared_distances(posteriors: Posterior, share: Tensor) -> Tensor:
    """Return the squared distances between clients ``[K, K]``, computed about a centre.

    The centre is the average of the clients with weights `share` ``[K]``.
    """
    gram = share.new_zeros(len(share), len(share))
    for _, points in _points(posteriors):
        for values in points.values():
            apart = values - share @ values
            gram += apart @ apart.T
    square = gram.diagonal()
    distances = (square[:, None] + square - 2 * gram).clamp_min(0)
    return (distances + distances.T) / 2


def _weiszfeld(apart: Tensor, smoothing: float, iterations: int) -> Tensor:
    """Return each client's share ``[K]`` in the smoothed geometric median.

    `apart` ``[K, K]`` are the clients' squared distances. With y = sum w x and sum w = 1,
    |y - x_j|^2 = sum_k w_k d_kj - sum_kl w_k w_l d_kl / 2, so that no step needs the points.
    """
    typical = apart.median(1).values.min().sqrt()
    share = torch.full_like(apart[0], 1 / len(apart))
    if not bool(typical > 0):  # most clients agree
        typical = apart.max().sqrt() * 1e-9
        if not bool(typical > 0):
            return share
    for _ in range(iterations):
        square = apart @ share - share @ apart @ share / 2
        nearness = square.clamp_min(0).sqrt().clamp_min(smoothing * typical).reciprocal()
        following = nearness / nearness.sum()
        moved = float((following - share).abs().max())
        share = following
        if moved <= CONVERGED:
            break
    share = share.round(decimals=DIGITS)
    return share / share.sum()


def _precision_weighted(
    mean: np.ndarray[Any, Any], variance: np.ndarray[Any, Any], cut: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return mean and variance ``[P]`` of `mean` and `variance` ``[P, K]``, both clamped.

    Ratios of the smallest clamped variance to the others are weighed instead of precisions, so that
    a variance of 0 is the limit: those who are certain decide.
    """
    mu, s = _clamped(mean, cut), _clamped(variance, cut)
    least = s.min(axis=1, keepdims=True)
    certain = s == 0
    ratio = np.where(certain, 1.0, least / np.where(certain, 1.0, s))
    total = ratio.sum(axis=1)
    origin = mu[:, [0]]
    return (
        origin[:, 0] + (ratio * (mu - origin)).sum(axis=1) / total,
        least[:, 0] * ratio.shape[1] / total,
    )


def _clamped(values: np.ndarray[Any, Any], cut: int) -> np.ndarray[Any, Any]:
    """Clamp ``[P, K]`` to the values of rank cut + 1 and K - cut in each row."""
    ranked = np.sort(values, axis=1)
    low, high = ranked[:, [cut]], ranked[:, [values.shape[1] - 1 - cut]]
    clamped: np.ndarray[Any, Any] = np.clip(values, low, high)
    return clamped


def _cut(fraction: float, clients: int) -> int:
    """Return how many clients are left out at either end."""
    return int(fraction * clients + 1e-9)  # 0.29 * 100 is 28.999... in binary, but 29 is meant


def _trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """Average ``[K, P]`` over clients without the `cut` smallest and the `cut` largest values."""
    fused = values.new_empty(values.shape[1:])
    for chunk in slices(len(fused), COORDINATES):
        # NumPy sorts short rows ten times as fast as torch does.
        rows = np.sort(values[:, chunk].T.contiguous().cpu().numpy(), axis=1)
        middle = rows[:, cut : len(values) - cut].mean(axis=1, dtype=np.float64)
        fused[chunk] = torch.from_numpy(middle)
    return fused
