"""Label noise: ``--label-noise NAME:EPS`` makes some training labels wrong after the split.

Test labels stay correct, so that metrics show how well a method learns despite the noise.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import attrs

from bflcore.data.base import Dataset, Integers
from bflcore.errors import DataError
from bflcore.lazy import lazy
from bflcore.options import Component, component, option

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = lazy("numpy")

__all__ = ["LabelNoise", "Pair", "Symmetric", "mislabelled"]


@component
class LabelNoise(Component, abc.ABC):
    """Base of label noises: each training label changes with probability `eps`."""

    kind: ClassVar[str] = "label-noise"

    eps: float = option(0.1, "probability that a training label is wrong", at_least=0, below=1)

    @abc.abstractmethod
    def transition(self, classes: int) -> npt.NDArray[np.float64]:
        """Return T ``[C, C]``: row i holds the probabilities of the noisy labels of class i."""


@component
class Pair(LabelNoise):
    """Flip labels to the next class: T[i, (i + 1) mod C] = eps."""

    name = "pair"
    reference = "Hahn et al. 2022 (SuPerFed), appendix A.4; Han et al. 2018"

    def transition(self, classes: int) -> npt.NDArray[np.float64]:
        """Return 1 - eps on the diagonal and eps beside it, cyclically."""
        return (1 - self.eps) * np.eye(classes) + self.eps * np.roll(np.eye(classes), 1, axis=1)


@component
class Symmetric(LabelNoise):
    """Flip labels to any other class, all equally likely: T[i, j] = eps / (C - 1)."""

    name = "symmetric"
    reference = "Hahn et al. 2022 (SuPerFed), appendix A.4; van Rooyen et al. 2015"

    def transition(self, classes: int) -> npt.NDArray[np.float64]:
        """Return 1 - eps on the diagonal and eps / (C - 1) elsewhere."""
        others = np.ones((classes, classes)) - np.eye(classes)
        return (1 - self.eps) * np.eye(classes) + self.eps / (classes - 1) * others


def mislabelled(
    dataset: Dataset, noise: LabelNoise, train: Integers, rng: np.random.Generator
) -> Dataset:
    """Return the data set with noisy labels at the samples `train`, drawn from `rng` alone.

    Raises `DataError` for a regression, which has no labels.
    """
    if dataset.task != "classification":
        raise DataError(
            f"--label-noise: {noise.name} needs class labels, {dataset.name} is a regression; "
            "leave --label-noise out, or choose a classification"
        )
    y = np.array(dataset.y, np.int64)
    upper = noise.transition(dataset.classes).cumsum(1)[y[train]]
    # Without the last column, whose sum may be below the draw because of rounding.
    y[train] = (rng.random(len(train))[:, None] >= upper[:, :-1]).sum(1)
    return attrs.evolve(dataset, y=y)
