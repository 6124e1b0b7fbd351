"""What fusion laws are tried on: well-scaled reals are drawn, valid posteriors built from them.

Nothing is filtered, so that failures shrink: towards one client, one parameter, mean 0, variance 1,
weight 1.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bflcore import Gaussian, Point
from bflcore.testing.aggregation_laws import Case
from bflcore.testing.aggregation_relations import Regression

DTYPES = st.sampled_from([torch.float64, torch.float32])
CLIENTS = st.integers(1, 50)
DECADES = 12  # precisions from 1e-12 to 1e12
DUST = 1e-12  # a millionth of the smallest standard deviation, 10^(-DECADES / 2)


def table(draw, rows, columns, low, high, fill=0.0):
    """Draw ``[rows, columns]``; in a large table most entries equal `fill`: drawing is slow."""
    reals = st.floats(low, high, width=32)
    return draw(arrays.arrays(float, (rows, columns), elements=reals, fill=st.just(fill)))


@st.composite
def cases(draw, family="gaussian", zeros=True, clients=CLIENTS):
    """Draw K posteriors, weights from 1e-9 to 1, and a prior no more certain than any client."""
    dtype, k, p = draw(DTYPES), draw(clients), draw(st.integers(1, 3))
    # Few reals are drawn; each client's are a mixture of them, so that no two need be equal.
    mean = _no_dust(torch.tensor(table(draw, k, p, -10, 10)) + _ripple(k, p, draw(st.floats(0, 3))))
    weights = 10.0 ** torch.tensor(table(draw, 1, k, -9, 0)[0])
    origin = _no_dust(torch.tensor(table(draw, 1, p, -10, 10)[0]))
    if family == "point":
        return Case(Point(mean.to(dtype)), weights, Point(origin.to(dtype)))
    power = table(draw, k, p, -DECADES, DECADES)
    power = torch.tensor(power) + _ripple(k, p, draw(st.floats(0, 3))) / 10
    variance = 10.0 ** power.clamp(-DECADES, DECADES)
    if zeros:
        certain = draw(arrays.arrays(bool, (k, p), fill=st.just(False)))
        variance = variance.masked_fill(torch.tensor(certain), 0.0)
    variance = variance.to(dtype)
    wider = 10.0 ** draw(st.floats(0, 2))
    prior = Gaussian(origin.to(dtype), variance.amax(0) * wider)
    return Case(Gaussian(mean.to(dtype), variance), weights, prior)


def _no_dust(means):
    """Make means 0 whose products with weights and precisions would lose digits by underflow."""
    return means.masked_fill(means.abs() < DUST, 0.0)


@st.composite
def regressions(draw):
    """Draw a regression whose rows each see one parameter, divided among 1 to 20 clients."""
    k, p, n = draw(st.integers(1, 20)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slopes = table(draw, k, n * p, -3, 3, fill=1.0)
    y = table(draw, k, n * p, -10, 10) + _ripple(k, n * p, draw(st.floats(0, 3))).numpy()
    seen = np.tile(np.eye(p), (n, 1))
    return Regression(
        tuple(row[:, None] * seen for row in slopes),
        tuple(y),
        10.0 ** draw(st.floats(-3, 3)),
        table(draw, 1, p, -10, 10)[0],
        10.0 ** table(draw, 1, p, -3, 3)[0],
    )


def _ripple(rows, columns, size):
    """Return reals that differ from row to row, no larger than `size`."""
    return size * torch.sin(torch.arange(1.0, rows * columns + 1, dtype=torch.float64)).view(
        rows, columns
    )
