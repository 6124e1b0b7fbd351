"""The lambda for prediction: its grid, its ensemble prior, and its choice on held-out samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Predictive, Problem
else:
    torch = lazy("torch")

__all__ = ["GRID", "PRIORS", "choose_lambda", "losses", "nearest_to_expected", "predict_mixtures"]

GRID = tuple(step / 10 for step in range(11))  # the paper's: 0, 0.1, ..., 1
# Equally likely values of lambda. ``falling`` has the density 2 (1 - lambda), with mean 1/3; its
# values are the quantiles (i + 1/2) / 11 of the distribution function 1 - (1 - lambda)^2.
EXPECTED = 1 / 3
PRIORS = {
    "uniform": GRID,
    "falling": tuple(1 - (1 - (i + 0.5) / 11) ** 0.5 for i in range(11)),
}


def predict_mixtures(
    problem: Problem, w_f: Tensor, w_l: Tensor, lambdas: Tensor, x: Tensor
) -> Predictive:
    """Predict `x` ``[K, B, ...]`` with W(lambda) for `lambdas` ``[K, S]`` and models ``[K, P]``."""
    draws = torch.lerp(w_f[:, None], w_l[:, None], lambdas[:, :, None])
    return problem.likelihood.predictive(problem.outputs(draws, x))


def choose_lambda(problem: Problem, w_f: Tensor, w_l: Tensor, x: Tensor, y: Tensor) -> float:
    """Choose a lambda of the grid for models ``[P]`` on held-out samples ``[V, ...]``."""
    mixtures = (torch.lerp(w_f, w_l, at) for at in GRID)
    return nearest_to_expected(torch.stack([losses(problem, w, x, y) for w in mixtures]))


def nearest_to_expected(losses: Tensor) -> float:
    """Choose a lambda of the grid, given its losses ``[11, V]`` on held-out samples.

    Among all values within one standard error of the best (of the paired difference), the nearest
    to `EXPECTED`: a few samples can seldom distinguish neighbouring values.
    """
    excess = losses - losses[losses.mean(1).argmin()]
    error = excess.std(1, correction=0) / len(excess[0]) ** 0.5
    alike = (excess.mean(1) <= error).tolist()
    return min(
        (at for at, is_alike in zip(GRID, alike, strict=True) if is_alike),
        key=lambda at: abs(at - EXPECTED),
    )


def losses(problem: Problem, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return 1 - p(y | x) for each sample ``[V]``, or -log p(y | x) for a regression.

    Held-out labels may be wrong, and the log loss of a confident model on a wrong label is
    unbounded. 1 - p(y | x) sums to a constant over labels; such a loss ranks models equally with
    and without symmetric label noise (Ghosh, Kumar & Sastry 2017, theorem 1).
    """
    with torch.no_grad():
        nll = problem.likelihood.nll(problem.forward(weights[None], x[None])[0], y)
    return -torch.expm1(-nll) if problem.likelihood.task == "classification" else nll
