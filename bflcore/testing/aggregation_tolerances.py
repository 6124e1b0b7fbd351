"""How exactly fused posteriors must agree with what a law expects."""

from __future__ import annotations

import torch
from torch import Tensor

from bflcore.aggregation import Aggregator
from bflcore.posteriors import Gaussian, Posterior
from bflcore.testing.aggregation_cases import Case

__all__ = ["close", "close_mean", "gaussian", "hold", "reach", "rounding", "tiny", "variances"]


def gaussian(posterior: Posterior) -> Gaussian:
    """Return the posterior; raise `AssertionError` if it is not Gaussian."""
    if not isinstance(posterior, Gaussian):
        raise AssertionError(f"{posterior.name} is not a Gaussian")  # noqa: TRY004 - a law broken
    return posterior


def variances(posterior: Posterior) -> Tensor:
    """Return the variance of each parameter ``[..., P]``; raise `AssertionError` without one."""
    found = posterior.marginals().get("variance")
    if found is None:
        raise AssertionError(f"{posterior.name} is not a Gaussian")
    return found


def rounding(case: Case) -> float:
    """Return the largest relative error that rounding can cause."""
    clients = len(case.weights)
    solved = 100 if case.prior.matrices else 1  # the condition numbers of the cases' matrices
    return 2 * solved * (clients + 8) * torch.finfo(case.prior.mean.dtype).eps


def tiny(case: Case) -> float:
    """Return the absolute error to allow: results near the smallest number lose digits."""
    return 100 * torch.finfo(case.prior.mean.dtype).tiny


def close(rule: Aggregator, case: Case, found: Posterior, expected: Posterior) -> None:
    """Require two posteriors to be the same to rounding."""
    amplified = len(case.weights) if "subtracts-prior" in rule.tags else 1.0
    amplified = max(amplified, rule.accuracy / rounding(case))
    close_mean(case, found.mean, expected.mean, amplified)
    if not isinstance(expected, Gaussian):
        _close_fields(case, found, expected)
        return
    variance = gaussian(found).variance.double()
    wanted = expected.variance.double()
    allowed = amplified * rounding(case) * wanted + tiny(case)
    if "mixture" in rule.tags:
        slack = rounding(case) * reach(case)
        allowed = allowed + 2 * slack * _gap(case) + slack.square()
    hold((variance - wanted).abs() <= allowed, "variance", variance, wanted)


def _close_fields(case: Case, found: Posterior, expected: Posterior) -> None:
    """Require the other fields of a family that is not Gaussian to be the same to rounding."""
    fields = found.pack()
    for name, tensor in expected.pack().items():
        if name != "mean":
            wanted, value = tensor.double(), fields[name].double()
            allowed = 100 * rounding(case) * (1 + wanted.abs())
            hold((value - wanted).abs() <= allowed, name, value, wanted)


def close_mean(case: Case, found: Tensor, expected: Tensor, amplified: float = 1) -> None:
    """Require two means ``[P]`` to be equal up to rounding."""
    wanted = expected.double()
    allowed = amplified * rounding(case) * (reach(case) + wanted.abs()) + tiny(case)
    hold((found.double() - wanted).abs() <= allowed, "mean", found, wanted)


def reach(case: Case) -> Tensor:
    """Return the magnitude of the numbers from which means are computed ``[P]``."""
    origin = case.prior.mean.double()
    return (case.posteriors.mean.double() - origin).abs().amax(0) + origin.abs()


def _gap(case: Case) -> Tensor:
    """Return how far apart the clients' means are ``[P]``."""
    means = case.posteriors.mean.double()
    return means.amax(0) - means.amin(0)


def hold(truth: Tensor, what: str, *values: Tensor) -> None:
    """Raise `AssertionError` unless all of `truth` ``[P]`` holds; name the first parameter."""
    if not bool(truth.all()):
        where = int((~truth).nonzero()[0, 0])
        shown = " against ".join(f"{float(value[where]):.17g}" for value in values)
        raise AssertionError(f"{what} at parameter {where}: {shown}")
