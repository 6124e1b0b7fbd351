"""The coefficients of a linear predictor, in the units of the data: ``coefficients.json``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.errors import OptionError, RunError
from bflcore.experiments.integrity import read_json
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.experiments.description import Description
    from bflcore.experiments.prepare import Prepared
    from bflcore.messages import Broadcast
    from bflcore.problem.base import Problem
else:
    torch = lazy("torch")

__all__ = ["FILE", "INTERCEPT", "Coefficient", "coefficients_of", "read_coefficients"]

FILE = "coefficients.json"
INTERCEPT = "(intercept)"
LARGEST_EXPONENT = 700.0  # of a double


@attrs.frozen
class Coefficient:
    """One coefficient: how much the linear predictor changes per unit of a feature.

    `output` is the class or the target that it is of; `sd` is the posterior standard deviation, and
    `lower` to `upper` a central credible interval. `ratio` is the exponential of the mean where
    that has a meaning and is `called` so: an odds ratio, or a rate ratio. A point estimate has
    neither a standard deviation nor an interval.
    """

    feature: str
    output: str
    mean: float
    sd: float | None = None
    lower: float | None = None
    upper: float | None = None
    ratio: float | None = None
    called: str = ""


def coefficients_of(
    prepared: Prepared, problem: Problem, broadcast: Broadcast
) -> dict[str, Any] | None:
    """Return the server's coefficients as plain values, to be stored in `FILE`.

    The network sees standardised features z = (x - m) / s and predicts targets in units of u around
    c. In the units of the data, a coefficient is u w / s and the intercept c + u (b - sum w m / s).
    None unless the model is interpretable, and all of it is shared.
    """
    model, described = prepared.experiment.model, prepared.description
    if not model.interpretable or problem.layout.personal_total:
        return None
    count, outputs = math.prod(described.shape), problem.layout.shapes[1][0]
    names = described.schema.features if described.schema else [f"x{j}" for j in range(count)]
    matrix, centre = _to_units(problem, count, outputs)
    mean, variance = broadcast.start.map(torch.Tensor.double).combinations(matrix)
    deviations = [None] * len(mean) if variance is None else variance.sqrt().tolist()
    rows = zip(
        product(_outputs(described, outputs), (INTERCEPT, *names)),
        (mean + centre).tolist(),
        deviations,
        strict=True,
    )
    return {
        "ratio": problem.likelihood.ratio,
        "coefficients": [
            {"feature": feature, "output": output, "mean": m, "sd": sd}
            for (output, feature), m, sd in rows
        ],
    }


def _outputs(described: Description, outputs: int) -> tuple[str, ...]:
    """Name the outputs of the predictor: classes (of two, the second), or targets."""
    if described.classes:
        return described.classes[-outputs:]
    target = described.schema.target if described.schema else "target"
    return (target,) if outputs == 1 else tuple(f"{target} {t}" for t in range(outputs))


def read_coefficients(run: Path, level: float = 0.95) -> list[Coefficient]:
    """Return the coefficients of a finished run with credible intervals of a `level`.

    Raises `RunError` if the run has none, `OptionError` unless 0 < `level` < 1.
    """
    if not 0 < level < 1:
        raise OptionError(f"--level: {level!r} is not allowed; allowed: above 0 and below 1")
    try:
        stored = read_json(run / FILE)
    except FileNotFoundError:
        raise RunError(
            f"{run} has no coefficients: they are those of a finished run of a linear predictor "
            "that is shared as a whole; train one with --model linear"
        ) from None
    return list(_with_intervals(stored, level))


def _with_intervals(stored: Mapping[str, Any], level: float) -> Iterator[Coefficient]:
    reach = NormalDist().inv_cdf(0.5 + level / 2)
    for row in stored["coefficients"]:
        mean, sd = row["mean"], row["sd"]
        named = stored["ratio"] and row["feature"] != INTERCEPT
        ratio = math.exp(min(mean, LARGEST_EXPONENT)) if named else None
        ends = {} if sd is None else {"lower": mean - reach * sd, "upper": mean + reach * sd}
        yield Coefficient(**row, **ends, ratio=ratio, called=stored["ratio"])


def _to_units(problem: Problem, count: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Return the matrix ``[T (F + 1), P]`` and the vector to be added, output by output.

    Rows: the intercept, then the features; columns: the weight ``[T, F]``, then the bias ``[T]``.
    """
    like = problem.initial.double()
    scaling = problem.train.scaling
    middle, spread = (like.new_zeros(count), like.new_ones(count))
    centre, unit = like.new_zeros(outputs), like.new_ones(outputs)
    if scaling:
        middle, spread = (one.double().reshape(-1) for one in scaling.x)
        if scaling.y is not None:
            centre, unit = (one.double().reshape(-1) for one in scaling.y)
    matrix = like.new_zeros(outputs, count + 1, outputs * count + outputs)
    added = like.new_zeros(outputs, count + 1)
    added[:, 0] = centre
    for t in range(outputs):
        own = slice(t * count, (t + 1) * count)
        matrix[t, 1:, own] = torch.diag(unit[t] / spread)
        matrix[t, 0, own] = -unit[t] * middle / spread
        matrix[t, 0, outputs * count + t] = unit[t]
    return matrix.flatten(0, 1), added.flatten()
