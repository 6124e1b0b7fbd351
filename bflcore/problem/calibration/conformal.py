"""Conformal prediction: sets of classes and intervals that contain the target at a chosen rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bflcore.lazy import lazy
from bflcore.options import component, option
from bflcore.problem.calibration.base import (
    SCOPE,
    SCOPES,
    Calibrator,
    moments,
    probabilities,
)
from bflcore.problem.calibration.sketch import bins_of, histogram, needed, thresholds, upper_ends

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem.likelihoods import Predictive
else:
    torch = lazy("torch")

__all__ = ["Conformal", "content_uniform"]

Sums = Mapping[str, "Tensor"]


@component
class Conformal(Calibrator):
    """Give prediction sets, or intervals, that contain the target at any rate that is asked for.

    Split conformal prediction. Clients send histograms of scores of their calibration samples; any
    coverage can be asked for later. If a new sample is exchangeable with the n calibration samples,
    its target is in the set with probability at least `coverage`, and at most
    ``coverage + 1 / (n + 1)`` plus the share of samples in one bin, whatever the model is. The
    probability is over calibration and new samples together: given the calibration samples, the
    coverage is Beta(k, n + 1 - k) distributed, k = ceil(coverage (n + 1)) (Vovk 2012). With a
    `confidence` the sets are larger, so that this coverage falls short of what is asked for with
    probability 1 - `confidence` at most. With too few samples, k > n, the set is everything.

    Scores: ``lac``, 1 - p(y), gives the smallest sets on average; ``aps``, the probability of all
    more probable classes and a random part of the label's own, adapts to the sample's difficulty
    (the random number is computed from the sample's probabilities: the same sample has the same
    set). A regression's score is the error in units of the predicted standard deviation.

    Groups: the guarantee may hold per predicted class, ``predicted`` (Mondrian), or per true class,
    ``label``: then each class is found with probability `coverage`. Each group needs enough
    samples of its own.

    The sets are never empty, unless `empty` is set: the most probable class is always in. An empty
    set says that no class fits, which `ood` says better; a user asks what it could be. It raises
    the coverage of a model that is more often right than `coverage`.
    """

    name = "conformal"
    reference = (
        "Vovk, Gammerman & Shafer 2005; Sadinle et al. 2019 (lac); Romano et al. 2020 (aps); "
        "Lei et al. 2018, section 5.2 (regression); Lu et al. 2023 (federated)"
    )

    scope: str = option("client", SCOPE, choices=SCOPES)  # what a client is promised is its own
    score: str = option("lac", "score of a class", choices=("lac", "aps"))
    group: str = option(
        "none", "groups with a guarantee each", choices=("none", "predicted", "label")
    )
    confidence: float = option(
        0.0,
        "probability that the calibration samples give the coverage (0 = it holds on average)",
        at_least=0,
        below=1,
    )
    empty: bool = option(False, "whether a set may be empty")

    def sums(self, predictive: Predictive, y: Tensor) -> dict[str, Tensor]:
        """Return histograms ``[G, BINS]`` of scores: one per group, or per target."""
        if predictive.noise is not None:
            mean, variance = moments(predictive)
            errors = (y.double() - mean).abs() / variance.sqrt()
            targets = torch.arange(y.shape[1], device=y.device).expand(y.shape)
            return {"scores": histogram(errors.reshape(-1), targets.reshape(-1), y.shape[1])}
        p = probabilities(predictive)
        rows = torch.arange(len(y), device=y.device)
        groups = self._groups(p)[rows, y]
        count = 1 if self.group == "none" else p.shape[1]
        return {"scores": histogram(self._scores(p)[rows, y], groups, count)}

    def region(self, sums: Sums, predictive: Predictive, coverage: float) -> Tensor:
        """Return the classes ``[B, C]`` with scores up to the threshold, or ends ``[2, B, T]``."""
        bins = thresholds(sums["scores"], coverage, self.confidence)
        if predictive.noise is not None:
            mean, variance = moments(predictive)
            reach = upper_ends(bins) * variance.sqrt()
            return torch.stack([mean - reach, mean + reach])
        p = probabilities(predictive)
        inside = bins_of(self._scores(p)) <= bins[self._groups(p)]
        if not self.empty:
            inside.scatter_(1, p.argmax(1, keepdim=True), value=True)
        return inside

    def shortage(self, sums: Sums, coverage: float) -> str:
        """Compare the smallest group of the histograms ``[G, BINS]`` with what coverage needs."""
        least, due = float(sums["scores"].sum(-1).min()), needed(coverage, self.confidence)
        if least >= due:
            return ""
        who = f"{self.scope} calibration samples"
        if self.group != "none":
            who += f" of the smallest group ({self.group})"
        pool = " (the scope federated uses all clients')" if self.scope == "client" else ""
        return (
            f"coverage {coverage:g} needs {due} {who}{pool}, there are {least:.4g}: where they are "
            "too few, everything is in the set"
        )

    def _scores(self, p: Tensor) -> Tensor:
        """Return the scores ``[B, C]`` of classes, as odds of a number in [0, 1]."""
        if self.score == "lac":
            return (1 - p) / p
        ordered, ranks = p.sort(dim=1, descending=True, stable=True)
        drawn = content_uniform(p)[:, None]
        reached = (ordered.cumsum(1) - (1 - drawn) * ordered).clamp(0, 1)
        mass = torch.empty_like(p).scatter_(1, ranks, reached)
        return mass / (1 - mass)

    def _groups(self, p: Tensor) -> Tensor:
        """Return the group ``[B, C]`` of each sample, were its label the class of the column."""
        if self.group == "label":
            return torch.arange(p.shape[1], device=p.device).expand(p.shape)
        if self.group == "predicted":
            return p.argmax(1, keepdim=True).expand(p.shape)
        return torch.zeros_like(p, dtype=torch.int64)


def content_uniform(p: Tensor) -> Tensor:
    """Return numbers in [0, 1) ``[B]`` that look random, and depend on the rows of `p` alone.

    The bits of each row are mixed as in SplitMix64 (Steele et al. 2014).
    """
    bits = p.contiguous().view(torch.int64)
    found = torch.zeros_like(bits[:, 0])
    for column in bits.unbind(1):
        found = found + column - 7046029254386353131  # 0x9E3779B97F4A7C15
        found = (found ^ _shifted(found, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
        found = (found ^ _shifted(found, 27)) * -7723592293110705685  # 0x94D049BB133111EB
        found = found ^ _shifted(found, 31)
    return _shifted(found, 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
