"""The hooks of this plugin, and its method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_glm.likelihoods import Bernoulli, Poisson, StudentT
from bfl_glm.low_rank import LowRankLaplace
from bfl_glm.sites import Laplace, LinearGaussian
from bflcore import Continual, Method, ProductOfChanges, hookimpl
from bflcore.models import Linear

if TYPE_CHECKING:
    from bflcore import Likelihood, LocalInference


class GLM(Method):
    """Fit a generalised linear model: coefficients and intervals as from the pooled table.

    The posterior is Laplace's approximation of the pooled one, exact for Gaussian noise. A client
    that answers again replaces what it said before, so that its data count once. No client is
    compared with the others (--trust): one that answers for the first time changes much more than
    those whose answers have settled.
    """

    name = "glm"
    reference = "McCullagh & Nelder 1989; sites: Bui et al. 2018, Ashman et al. 2022"
    inference = Laplace(noise="estimated")
    aggregator = ProductOfChanges()
    hyper = Continual()
    model = Linear()
    settings = {"rounds": 20, "dtype": "float64", "trust": 0.0}


@hookimpl
def bfl_likelihoods() -> Iterator[type[Likelihood]]:
    """Yield the likelihoods of truth values, counts, and targets with outliers."""
    yield from (Bernoulli, Poisson, StudentT)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the exact inference of linear models, and Laplace's approximations."""
    yield from (LinearGaussian, Laplace, LowRankLaplace)


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method of the same name."""
    yield GLM
