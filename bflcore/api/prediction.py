"""Predictions, and how uncertain they are."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import OptionError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem import metrics
    from bflcore.problem.likelihoods import Predictive
    from bflcore.problem.scaling import Scaling
else:
    torch = lazy("torch")
    metrics = lazy("bflcore.problem.metrics")

__all__ = ["ClassPrediction", "Prediction", "TargetPrediction", "prediction_of"]


@attrs.frozen(eq=False)
class Prediction(abc.ABC):
    """What one model predicts for B samples.

    `draws` ``[S, B, C]`` are the class probabilities, or the means of the targets, of S draws of
    the parameters. Uncertainty has two parts: `aleatoric`, which more training data would not
    reduce, and `epistemic`, which comes from not knowing the parameters.
    """

    draws: Tensor

    if TYPE_CHECKING:  # every prediction has both, as fields or as properties

        @property
        def aleatoric(self) -> Tensor:
            """Uncertainty that would remain if the parameters were known ``[B, ...]``."""

        @property
        def epistemic(self) -> Tensor:
            """Uncertainty from not knowing the parameters ``[B, ...]``."""

    @abc.abstractmethod
    def columns(self) -> dict[str, list[object]]:
        """Return the columns of a table with one row per sample."""


@attrs.frozen(eq=False)
class ClassPrediction(Prediction):
    """Predictions of a classification, in float64.

    `probabilities` ``[B, C]``: the draws' mean, or a method's closed form; `classes` names the C
    classes.
    """

    probabilities: Tensor
    classes: tuple[str, ...]

    @property
    def labels(self) -> Tensor:
        """The most probable classes ``[B]``, as numbers."""
        return self.probabilities.argmax(1)

    @property
    def names(self) -> list[str]:
        """The most probable classes, by name."""
        return [self.classes[int(label)] for label in self.labels]

    @property
    def entropy(self) -> Tensor:
        """Entropy of the probabilities ``[B]`` as a fraction of log C: 0 certain, 1 uniform."""
        return self._uncertainties["entropy"] / math.log(self.probabilities.shape[1])

    @property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of 1 - sum p^2 ``[B]`` (Kwon et al. 2020, eq. 4)."""
        return self._uncertainties["aleatoric"]

    @property
    def epistemic(self) -> Tensor:
        """Variance of the probabilities over the draws, summed over classes ``[B]`` (likewise)."""
        return self._uncertainties["epistemic"]

    @property
    def mutual_information(self) -> Tensor:
        """Information ``[B]``, in nats, that the label would give about the parameters."""
        return self._uncertainties["mutual_information"]

    @property
    def _uncertainties(self) -> dict[str, Tensor]:
        return metrics.uncertainties(self.draws.double(), self.probabilities)

    def columns(self) -> dict[str, list[object]]:
        """Return label, a probability per class, entropy, epistemic and aleatoric uncertainty."""
        found = self._uncertainties
        return {
            "label": list(self.names),
            **{
                f"probability_{name}": column.tolist()
                for name, column in zip(self.classes, self.probabilities.T, strict=True)
            },
            "entropy": self.entropy.tolist(),
            **{name: found[name].tolist() for name in ("epistemic", "aleatoric")},
        }


@attrs.frozen(eq=False)
class TargetPrediction(Prediction):
    """Predictions of a regression, in the units of the targets.

    `mean` ``[B, T]``; `aleatoric` and `epistemic` ``[B, T]`` are variances.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def std(self) -> Tensor:
        """Standard deviation of the targets ``[B, T]``: noise and parameters together."""
        return (self.aleatoric + self.epistemic).sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends ``[B, T]`` of the central interval, taken as Gaussian.

        Raises `OptionError` unless 0 < `level` < 1.
        """
        if not 0 < level < 1:
            raise OptionError(f"level: {level!r} is not allowed; allowed: above 0 and below 1")
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.std
        return self.mean - reach, self.mean + reach

    def columns(self) -> dict[str, list[object]]:
        """Return mean, std, lower and upper (90 per cent), numbered if there are more targets."""
        lower, upper = self.interval()
        found = {"mean": self.mean, "std": self.std, "lower": lower, "upper": upper}
        targets = self.mean.shape[1]
        return {
            name if targets == 1 else f"{name}_{t}": values[:, t].tolist()
            for t in range(targets)
            for name, values in found.items()
        }


def prediction_of(
    parts: Sequence[Predictive], classes: tuple[str, ...], scaling: Scaling | None
) -> Prediction:
    """Join the predictions of one client ``[1, S, B, C]``, block by block, to one prediction.

    `scaling` is that of the targets, if they were standardised.
    """
    draws = torch.cat([part.draws[0] for part in parts], dim=1)
    noises = [part.noise for part in parts]
    if any(noise is None for noise in noises):
        closed = [part.closed_form[0] for part in parts if part.closed_form is not None]
        p = torch.cat(closed).double() if closed else draws.double().mean(0)
        return ClassPrediction(draws, p, classes)
    noise = torch.cat([
        (noise[0] if noise.ndim else noise).expand_as(part.draws[0, 0])
        for part, noise in zip(parts, noises, strict=True)
        if noise is not None
    ])  # fmt: skip
    mean, epistemic = draws.mean(0), draws.var(0, correction=0)
    if scaling is not None and scaling.y is not None:
        centre, unit = scaling.y
        draws, mean = draws * unit + centre, mean * unit + centre
        noise, epistemic = noise * unit.square(), epistemic * unit.square()
    return TargetPrediction(draws, mean, noise, epistemic)
