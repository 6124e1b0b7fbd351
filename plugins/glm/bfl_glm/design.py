"""The design of a linear model: is the model linear, and do the columns determine each other?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore import OptionError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Problem
else:
    torch = lazy("torch")

__all__ = ["check_columns", "is_linear"]

# A column of which so small a part of its variance is left is a combination of the others: 1e-10
# is the square of a relative error of 1e-5, as in columns that were rounded to five digits.
LEFT = 1e-10
CONSTANT = 1e-7  # a deviation that is this small a part of the mean is rounding


def is_linear(problem: Problem) -> bool:
    """Return whether the network's outputs are linear in its parameters and take flat samples."""
    train = problem.train.x
    if train.ndim != 2:
        return False
    x = torch.linspace(-1, 1, 4 * train.shape[1], dtype=torch.float64).reshape(1, 4, -1)
    x = x.to(train.device)
    size = problem.layout.total
    one, two = torch.linspace(0.5, 1.5, size).double(), torch.linspace(-1, 2, size).double().cos()
    with torch.no_grad():
        found = [
            problem.forward(w[None].to(train.device), x) for w in (one, two, one + two, 0 * one)
        ]
    return bool(torch.allclose(found[0] + found[1] - found[3], found[2], rtol=1e-9, atol=1e-9))


def check_columns(problem: Problem) -> None:
    """Raise `OptionError` if a column of the clients' samples is a combination of those before it.

    The intercept comes before all columns, so that a constant column is one, too. With fewer
    samples than columns the prior has to decide, and nothing is refused.
    """
    correlation, samples = _correlations(problem)
    if samples <= len(correlation):
        return
    factor, failed = torch.linalg.cholesky_ex(correlation)
    # The parts of their variances that the columns before do not give; the last one may be < 0.
    left = factor.diagonal().square()[: int(failed) or None]
    if int(failed):
        left[-1] = 0.0
    lost = (left <= LEFT).nonzero()
    if not len(lost):
        return
    column = int(lost[0])
    name = problem.features[column] if problem.features else f"{column} (from 0)"
    raise OptionError(
        f"--data: column {name} is a linear combination of the intercept and the columns before "
        "it, so that their coefficients are not determined; leave it out (--drop), or let the "
        "prior decide (-o inference.collinear=allow)"
    )


def _correlations(problem: Problem) -> tuple[Tensor, int]:
    """Return the correlations ``[F, F]`` of all clients' columns, and the number of samples.

    A missing value counts as the mean; a constant column has the variance 0.
    """
    shares = [problem.train.of(client)[0].double() for client in problem.clients]
    known = sum((x.isfinite().sum(0) for x in shares), start=torch.tensor(0))
    mean = sum((x.nan_to_num(0.0).sum(0) for x in shares), start=torch.tensor(0.0))
    mean = mean / known.clamp_min(1)
    apart = [(x - mean).nan_to_num(0.0) for x in shares]
    products = sum((x.T @ x for x in apart), start=torch.tensor(0.0))
    samples = sum(map(len, shares))
    size = products.diagonal()
    constant = size <= (CONSTANT * mean).square() * samples
    scale = size.masked_fill(constant, 1.0).sqrt()
    found = products / scale / scale[:, None]
    return found * ~constant * ~constant[:, None], samples
