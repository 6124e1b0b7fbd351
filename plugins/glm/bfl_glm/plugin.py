"""The hooks of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_glm.likelihoods import Bernoulli, Poisson, StudentT
from bflcore import hookimpl

if TYPE_CHECKING:
    from bflcore import Likelihood


@hookimpl
def bfl_likelihoods() -> Iterator[type[Likelihood]]:
    """Yield the likelihoods of truth values, counts, and targets with outliers."""
    yield from (Bernoulli, Poisson, StudentT)
