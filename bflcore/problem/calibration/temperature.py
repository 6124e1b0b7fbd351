"""Temperature scaling: one number that makes predictions more or less certain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bflcore.lazy import lazy
from bflcore.options import component
from bflcore.problem.calibration.base import EXAMPLES, Calibrator, moments, probabilities

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem import metrics
    from bflcore.problem.likelihoods import Predictive
else:
    torch = lazy("torch")
    metrics = lazy("bflcore.problem.metrics")

__all__ = ["Temperature"]

LARGEST = 10.0  # temperatures lie between 1/10 and 10
POINTS = 93  # of the grid of log temperatures: a step of .05


@component
class Temperature(Calibrator):
    """Divide log probabilities by the temperature with the smallest negative log likelihood.

    The predictive density p becomes p^(1/T), normalised, with one T for all classes: the most
    probable class stays the same. Clients send their negative log likelihood, summed over samples,
    on a grid of log T; a parabola through the smallest value and its neighbours gives T. For a
    regression p^(1/T) is Gaussian with T times the variance, and T is the mean of the squared
    standardised errors, per target.

    Nothing is guaranteed: T is a maximum likelihood estimate of one number.
    """

    name = "temperature"
    reference = "Guo et al. 2017, eq. 9; Laves et al. 2020 (regression)"

    def sums(self, predictive: Predictive, y: Tensor) -> dict[str, Tensor]:
        """Return negative log likelihoods ``[POINTS]``, or squared standardised errors ``[T]``."""
        if predictive.noise is not None:
            mean, variance = moments(predictive)
            return {"squares": ((y.double() - mean).square() / variance).sum(0)}
        logs = _logs(predictive)
        losses = [_loss(logs / t, y) for t in _grid(logs).exp()]
        return {"nll": torch.stack(losses)}

    def adjust(self, sums: Mapping[str, Tensor], predictive: Predictive) -> Predictive:
        """Return p^(1/T) ``[1, S, B, C]``: a closed form beside the draws, or scaled variances."""
        t = self.temperature(sums)
        if predictive.noise is None:
            tempered = (_logs(predictive) / t).softmax(-1)
            return attrs.evolve(predictive, closed_form=tempered[None])
        mean = predictive.draws.mean(1, keepdim=True)
        draws = mean + (predictive.draws - mean) * t.sqrt().to(mean.dtype)
        return attrs.evolve(predictive, draws=draws, noise=predictive.noise * t.to(mean.dtype))

    def temperature(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Return T ``[]`` (classification) or ``[T]`` (regression); 1 without samples."""
        if not float(sums[EXAMPLES]):
            return next(iter(sums.values())).new_ones((), dtype=torch.float64)
        if "squares" in sums:
            found = sums["squares"] / sums[EXAMPLES]
            return found.masked_fill(found == 0, 1)  # every error is 0: no scale
        nll = sums["nll"]
        grid, best = _grid(nll), int(nll.argmin())
        if not 0 < best < POINTS - 1:
            return grid[best].exp()
        left, middle, right = nll[best - 1 : best + 2]
        step, bend = grid[1] - grid[0], left - 2 * middle + right
        return (grid[best] + (0.5 * step * (left - right) / bend if bend > 0 else 0)).exp()


def _logs(predictive: Predictive) -> Tensor:
    return probabilities(predictive).clamp_min(metrics.CLIP).log()


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, y, reduction="sum")


def _grid(like: Tensor) -> Tensor:
    end = math.log(LARGEST)
    return torch.linspace(-end, end, POINTS, dtype=torch.float64, device=like.device)
