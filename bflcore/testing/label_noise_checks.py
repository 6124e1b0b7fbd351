"""Checks of label noise: a label changes to another class with probability `eps`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bflcore.data.label_noise import LabelNoise

__all__ = ["checks_of"]

Part = type[LabelNoise]


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of a label noise."""
    yield from (rows_are_probabilities, labels_change_with_probability_eps)


def rows_are_probabilities(part: Part) -> None:
    """Every row of the matrix ``[C, C]`` is a distribution over classes."""
    for classes in (2, 3, 10):
        matrix = part(eps=0.3).transition(classes)
        if matrix.shape != (classes, classes):
            raise AssertionError(f"{matrix.shape} for {classes} classes; expected one row each")
        if (matrix < 0).any() or not np.allclose(matrix.sum(1), 1):
            raise AssertionError(f"rows must be >= 0 and sum to one, but the matrix is {matrix}")


def labels_change_with_probability_eps(part: Part) -> None:
    """The diagonal is 1 - eps."""
    for eps in (0.0, 0.3):
        kept = np.diag(part(eps=eps).transition(4))
        if not np.allclose(kept, 1 - eps):
            raise AssertionError(f"labels are kept with probability {kept} for eps = {eps}")
