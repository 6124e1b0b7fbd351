"""Predictions, and how uncertain they are."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import OptionError
from bflcore.lazy import lazy
from bflcore.problem.calibration.base import adjust
from bflcore.problem.likelihoods import Predictive

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem import metrics, ood
    from bflcore.problem.calibration.base import Fitted
    from bflcore.problem.scaling import Scaling
else:
    torch = lazy("torch")
    metrics = lazy("bflcore.problem.metrics")
    ood = lazy("bflcore.problem.ood")

__all__ = ["ClassPrediction", "Prediction", "TargetPrediction", "prediction_of"]

NO_SETS = (
    "coverage: the run was not calibrated for prediction sets; train it with "
    "--calibration-fraction 0.2"
)


@attrs.frozen(eq=False)
class Prediction(abc.ABC):
    """What one model predicts for B samples.

    `draws` ``[S, B, C]`` are the class probabilities, or the means of the targets, of S draws of
    the parameters. Uncertainty has two parts: `aleatoric`, which more training data would not
    reduce, and `epistemic`, which comes from not knowing the parameters. `made` ``[1, S, B, C]`` is
    what the model predicts before calibration, `fitted` are the calibrators that the run fitted.
    """

    draws: Tensor
    made: Predictive = attrs.field(repr=False)
    fitted: tuple[Fitted, ...] = attrs.field(repr=False)

    if TYPE_CHECKING:  # every prediction has both, as fields or as properties

        @property
        def aleatoric(self) -> Tensor:
            """Uncertainty that would remain if the parameters were known ``[B, ...]``."""

        @property
        def epistemic(self) -> Tensor:
            """Uncertainty from not knowing the parameters ``[B, ...]``."""

    @property
    def calibrated_by(self) -> tuple[str, ...]:
        """The names of the calibrators in effect, which the run fitted after training."""
        return tuple(one.calibrator.name for one in self.fitted)

    @property
    def ood_score(self) -> Tensor:
        """How unlike the training samples each sample looks ``[B]``; see `ood_scores`."""
        return ood.ood_scores(self.made)[0]

    @property
    def out_of_distribution(self) -> Tensor | None:
        """Which samples ``[B]`` look stranger than most calibration samples; None without such."""
        found = (one.unlike(self.made) for one in self.fitted)
        return next((flags for flags in found if flags is not None), None)

    @abc.abstractmethod
    def columns(self, coverage: float | None = None) -> dict[str, list[object]]:
        """Return the columns of a table with one row per sample.

        `coverage` is that of sets or intervals (default: 0.9). Raises `OptionError` if it is given
        and the run has no calibrated ones, or unless it is above 0 and below 1.
        """

    def _region(self, coverage: float, called: str = "coverage") -> Tensor | None:
        """Return the calibrated region ``[...]``; warn if there are too few samples for it."""
        if not 0 < coverage < 1:
            raise OptionError(
                f"{called}: {coverage!r} is not allowed; allowed: above 0 and below 1"
            )
        for one in self.fitted:
            region = one.region(self.made, coverage)
            if region is not None:
                if text := one.calibrator.shortage(one.sums, coverage):
                    warnings.warn(text, stacklevel=3)
                return region
        return None

    def _flags(self) -> dict[str, list[object]]:
        """Return the columns of the out-of-distribution score, where there is a threshold."""
        flags = self.out_of_distribution
        if flags is None:
            return {}
        return {"ood_score": self.ood_score.tolist(), "out_of_distribution": flags.int().tolist()}


@attrs.frozen(eq=False)
class ClassPrediction(Prediction):
    """Predictions of a classification, in float64.

    `probabilities` ``[B, C]``: the draws' mean, or a method's closed form, adjusted by a
    temperature if the run fitted one; `classes` names the C classes.
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

    def contains(self, coverage: float = 0.9) -> Tensor:
        """Return which classes are in the prediction set ``[B, C]`` of each sample.

        A set has the true class with probability at least `coverage`; what that is averaged over,
        and why no set is empty, is said at `Conformal`. Warns if there are too few calibration
        samples: then a set may hold every class. Raises `OptionError` if the run has no calibrator
        that gives sets, or unless 0 < `coverage` < 1.
        """
        found = self._region(coverage)
        if found is None:
            raise OptionError(NO_SETS)
        return found

    def set(self, coverage: float = 0.9) -> list[list[str]]:
        """Return the prediction sets as names of classes, the most probable first.

        See `contains`.
        """
        return self._named(self.contains(coverage))

    def _named(self, inside: Tensor) -> list[list[str]]:
        order = self.probabilities.argsort(1, descending=True)
        return [
            [self.classes[c] for c in row if members[c]]
            for row, members in zip(order.tolist(), inside.tolist(), strict=True)
        ]

    def columns(self, coverage: float | None = None) -> dict[str, list[object]]:
        """Return label, a probability per class, entropy, epistemic and aleatoric uncertainty.

        A calibrated run adds ``set``, names of classes joined by ``|``, and `out_of_distribution`.
        """
        found = self._uncertainties
        inside = self._region(0.9) if coverage is None else self.contains(coverage)
        sets: dict[str, list[object]] = {}
        if inside is not None:
            sets = {"set": ["|".join(names) for names in self._named(inside)]}
        return {
            "label": list(self.names),
            **{
                f"probability_{name}": column.tolist()
                for name, column in zip(self.classes, self.probabilities.T, strict=True)
            },
            "entropy": self.entropy.tolist(),
            **{name: found[name].tolist() for name in ("epistemic", "aleatoric")},
            **sets,
            **self._flags(),
        }


@attrs.frozen(eq=False)
class TargetPrediction(Prediction):
    """Predictions of a regression, in the units of the targets.

    `mean` ``[B, T]``; `aleatoric` and `epistemic` ``[B, T]`` are variances.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    scale: tuple[Tensor, Tensor] | None = None  # centre and unit of standardised targets
    least: float = -math.inf  # smallest possible target

    @property
    def std(self) -> Tensor:
        """Standard deviation of the targets ``[B, T]``: noise and parameters together."""
        return (self.aleatoric + self.epistemic).sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends ``[B, T]`` of the interval that has the target at this rate.

        If `calibrated_by` names ``conformal``, what `Conformal` says is guaranteed; infinite, with
        a warning, if there are too few calibration samples. Otherwise the central interval of a
        Gaussian, which is as good as the model. Raises `OptionError` unless 0 < `level` < 1.
        """
        found = self._region(level, "level")
        if found is not None:
            if self.scale is not None:
                found = found * self.scale[1] + self.scale[0]
            return found[0], found[1]
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.std
        return (self.mean - reach).clamp_min(self.least), self.mean + reach

    def columns(self, coverage: float | None = None) -> dict[str, list[object]]:
        """Return mean, std, lower and upper end of `interval`, numbered if there are more targets.

        A calibrated run adds the flag for strange samples.
        """
        lower, upper = self.interval(0.9 if coverage is None else coverage)
        found = {"mean": self.mean, "std": self.std, "lower": lower, "upper": upper}
        targets = self.mean.shape[1]
        columns: dict[str, list[object]] = {
            name if targets == 1 else f"{name}_{t}": values[:, t].tolist()
            for t in range(targets)
            for name, values in found.items()
        }
        return columns | self._flags()


def prediction_of(
    parts: Sequence[Predictive],
    classes: tuple[str, ...],
    scaling: Scaling | None,
    fitted: tuple[Fitted, ...] = (),
    least: float = -math.inf,
) -> Prediction:
    """Join the predictions of one client ``[1, S, B, C]``, block by block, to one prediction.

    `scaling` is that of the targets, if they were standardised; `fitted` adjust the predictions;
    no target is below `least`.
    """
    made, joined = _join(parts), _join([adjust(fitted, part) for part in parts])
    draws, noise = joined.draws[0], joined.noise
    if noise is None:
        closed = joined.closed_form
        p = draws.double().mean(0) if closed is None else closed[0].double()
        return ClassPrediction(made.draws[0], made, fitted, p, classes)
    noise, mean, epistemic = noise[0], draws.mean(0), draws.var(0, correction=0)
    scale = scaling.y if scaling else None
    if scale is not None:
        centre, unit = scale
        draws, mean = draws * unit + centre, mean * unit + centre
        noise, epistemic = noise * unit.square(), epistemic * unit.square()
    return TargetPrediction(draws, made, fitted, mean, noise, epistemic, scale, least)


def _join(parts: Sequence[Predictive]) -> Predictive:
    """Join predictions of the samples of one client, with a noise per sample."""
    closed = [part.closed_form for part in parts if part.closed_form is not None]
    noises = [
        (part.noise if part.noise.ndim else part.noise[None]).expand_as(part.draws[:, 0])
        for part in parts
        if part.noise is not None
    ]
    return Predictive(
        torch.cat([part.draws for part in parts], dim=2),
        torch.cat(noises, dim=1) if noises else None,
        torch.cat(closed, dim=1) if closed else None,
    )
