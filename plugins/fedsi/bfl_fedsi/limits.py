"""What the inference refuses before a run begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from bfl_fedsi.laplace import size
from bflcore import Categorical, GaussianNoise, OptionError

if TYPE_CHECKING:
    from bfl_fedsi.plugin import SubnetworkLaplace
    from bflcore import Problem

__all__ = ["available", "bytes_needed", "check"]


def check(inference: SubnetworkLaplace, problem: Problem) -> None:
    """Raise `OptionError` where nothing travels, no curvature is known, or memory is too small."""
    if not problem.layout.shared_total:
        raise OptionError(
            "--share: no parameter of the network travels (its head is all there is, or share is "
            "none), so there is nothing to infer; allowed: share all, or a model with layers "
            "before its head"
        )
    if not isinstance(problem.likelihood, Categorical | GaussianNoise):
        raise OptionError(
            f"--likelihood: {problem.likelihood.name} has no known curvature for "
            f"{inference.name}; allowed: {Categorical.name}, {GaussianNoise.name}"
        )
    needed, free = bytes_needed(inference, problem), available(problem.device)
    if needed > free:
        raise OptionError(
            f"inference.fraction: a subnetwork of {size(inference, problem):,} parameters takes "
            f"{needed / 2**30:.1f} GiB a client, the machine has {free / 2**30:.1f} GiB; lower "
            "inference.fraction, or set inference.covariance=diagonal"
        )


def bytes_needed(inference: SubnetworkLaplace, problem: Problem) -> int:
    """Return the most that one client's inference takes: four matrices of its side."""
    if inference.covariance == "diagonal":
        return 0
    count = size(inference, problem)
    with torch.no_grad():
        outputs = problem.forward(problem.initial[None], problem.train.x[None, :1]).shape[-1]
    rows = outputs * max(map(problem.train.size, range(len(problem.train.start))))
    dual = 2 * rows * (rows + count)
    entries = {"primal": 4 * count**2, "dual": dual, "auto": min(4 * count**2, dual)}
    return entries[inference.covariance] * problem.initial.element_size()


def available(device: torch.device) -> int:
    """Return the bytes of memory of the machine, or of the device where that is another."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
