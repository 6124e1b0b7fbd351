"""Checks of calibrators: their sums add up, and samples are calibrated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor

from bflcore.problem.calibration.base import Calibrator, Fitted, answer, fit
from bflcore.problem.likelihoods import Categorical, GaussianNoise, Predictive
from bflcore.testing import problems

__all__ = ["checks_of"]

Part = type[Calibrator]

B, S, C = 40, 3, 4  # samples; draws; classes or targets
LEVELS = (0.5, 0.8)
LIKELIHOODS = {"classification": Categorical(), "regression": GaussianNoise()}


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of a calibrator."""
    yield from (
        sums_add_up_over_samples,
        sums_are_counts_or_positive_numbers,
        inputs_stay_unchanged,
        adjusted_predictions_are_predictions,
        samples_are_calibrated_one_by_one,
        regions_have_a_shape_and_grow_with_the_coverage,
    )


def sums_add_up_over_samples(part: Part) -> None:
    """The sums of two parts of the samples add up to the sums of all, to rounding."""
    for predictive, y in _samples(part):
        whole = part().sums(predictive, y)
        first, rest = (
            part().sums(_rows(predictive, rows), y[rows]) for rows in (slice(15), slice(15, None))
        )
        for name, expected in whole.items():
            found = first[name] + rest[name]
            if found.shape != expected.shape or not torch.allclose(found, expected):
                raise AssertionError(f"{name} of two parts adds up to {found}, of all: {expected}")


def sums_are_counts_or_positive_numbers(part: Part) -> None:
    """Sums are int64 or float64, finite and not negative: the server refuses others."""
    for predictive, y in _samples(part):
        for name, tensor in part().sums(predictive, y).items():
            if tensor.dtype not in (torch.int64, torch.float64):
                raise AssertionError(f"{name} is {tensor.dtype}; expected int64 or float64")
            if not tensor.isfinite().all() or (tensor < 0).any():
                raise AssertionError(f"{name} is {tensor}; expected finite numbers, none below 0")


def inputs_stay_unchanged(part: Part) -> None:
    """Predictions, targets and sums are read, not changed."""
    for predictive, y in _samples(part):
        fitted = _fitted(part, predictive, y)
        given = {"predictions": predictive, "targets": y, "sums": fitted.sums}
        (before,) = problems.copies(given)
        fitted.calibrator.sums(predictive, y)
        _all(fitted, predictive)
        problems.assert_same(given, before, "changed by calibrating")


def adjusted_predictions_are_predictions(part: Part) -> None:
    """Probabilities are >= 0 and sum to one, variances are above 0, and shapes stay."""
    for predictive, y in _samples(part):
        fitted = _fitted(part, predictive, y)
        found = fitted.calibrator.adjust(fitted.sums, predictive)
        if found.draws.shape != predictive.draws.shape or found.mean.shape != predictive.mean.shape:
            raise AssertionError(f"draws are {tuple(found.draws.shape)} after adjusting")
        if predictive.noise is None:
            total = found.mean.double().sum(-1)
            if not (found.mean >= 0).all() or not torch.allclose(total, torch.ones_like(total)):
                raise AssertionError("probabilities must be >= 0 and sum to one")
        elif found.noise is None or not (found.noise > 0).all():
            raise AssertionError(f"noise is {found.noise}; a regression needs a variance above 0")


def samples_are_calibrated_one_by_one(part: Part) -> None:
    """A sample's calibrated prediction does not depend on the samples beside it."""
    for predictive, y in _samples(part):
        fitted, rows = _fitted(part, predictive, y), slice(5, 9)
        whole, some = _all(fitted, predictive), _all(fitted, _rows(predictive, rows))
        for name, tensor in whole.items():
            expected = tensor[:, rows] if name.startswith("ends") else tensor[rows]
            if not torch.allclose(some[name].double(), expected.double()):
                raise AssertionError(f"{name} of four samples differ beside {B - 4} others")


def regions_have_a_shape_and_grow_with_the_coverage(part: Part) -> None:
    """Regions are booleans ``[B, C]`` or ends ``[2, B, T]``; a larger coverage contains more."""
    for predictive, y in _samples(part):
        fitted = _fitted(part, predictive, y)
        small, large = (fitted.region(predictive, level) for level in LEVELS)
        if small is None or large is None:
            continue
        classes = predictive.noise is None
        shape, dtype = ((B, C), torch.bool) if classes else ((2, B, C), torch.float64)
        if (tuple(small.shape), small.dtype) != (shape, dtype):
            raise AssertionError(f"regions are {small.dtype} {tuple(small.shape)}; not {shape}")
        nested = (small <= large) if classes else (large[0] <= small[0]) & (small[1] <= large[1])
        if not nested.all():
            raise AssertionError(f"regions of coverage {LEVELS[0]} exceed those of {LEVELS[1]}")


def _samples(part: Part) -> Iterator[tuple[Predictive, Tensor]]:
    """Yield predictions ``[1, S, B, C]`` and targets, for each task of the calibrator."""
    outputs = problems.normal(1, S, B, C)
    labels = torch.arange(B) % C
    targets = {
        "classification": labels,
        "regression": outputs[0, 0] + problems.normal(B, C, seed=1),
    }
    for task in part.tasks:
        yield LIKELIHOODS[task].predictive(outputs), targets[task]


def _fitted(part: Part, predictive: Predictive, y: Tensor) -> Fitted:
    """Return the calibrator with the sums of client 0, the only one that answered."""
    total = answer([part()], [(predictive, y)]) | {"answered": torch.tensor([0])}
    return fit([part()], 0, {}, total)[0]


def _all(fitted: Fitted, predictive: Predictive) -> dict[str, Tensor]:
    """Return all that calibration gives, samples first (ends second)."""
    found = {"probabilities or means": fitted.calibrator.adjust(fitted.sums, predictive).mean[0]}
    region, unlike = fitted.region(predictive, 0.8), fitted.unlike(predictive)
    if region is not None:
        found["regions" if predictive.noise is None else "ends of intervals"] = region
    return found if unlike is None else found | {"flags": unlike}


def _rows(predictive: Predictive, rows: slice) -> Predictive:
    return attrs.evolve(predictive, draws=predictive.draws[:, :, rows])
