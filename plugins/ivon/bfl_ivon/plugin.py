"""The methods that train with IVON, and the hooks of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_aggregators.products import LogLinearPool
from bfl_ivon.ivon import Ivon
from bflcore import Average, Continual, Equal, Examples, Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference

BARYCENTRES = "Jamoussi, Serra, Stavrou & Kountouris 2025 (BA-BFL)"


class FedIvon(Method):
    """Train one shared Gaussian by IVON; the server averages Hessians, and means weighted by them.

    The paper weights Hessians per sample by the clients' sizes. In precisions, which are sums over
    a client's samples, that is a log-linear pool with equal weights.
    """

    name = "fedivon"
    reference = "Pal, Gupta, Sarwar & Rai 2025 (FedIvon)"
    inference = Ivon(prior_sigma=1.0)
    aggregator = LogLinearPool()
    weighting = Equal()


class FedIvonPersonal(Method):
    """Share a Gaussian that is the prior of each client's own, with which the client predicts."""

    name = "fedivon-personal"
    reference = "Pal, Gupta, Sarwar & Rai 2025 (FedIvon), personalised"
    inference = Ivon(prior_sigma=1.0, own_share=1.0)
    aggregator = LogLinearPool()
    weighting = Equal()
    hyper = Continual()


class BarycentreRKL(Method):
    """Train one shared Gaussian by IVON; fuse as the reverse-KL barycentre."""

    name = "barycentre-rkl"
    reference = f"{BARYCENTRES}, reverse KL"
    inference = Ivon(prior_sigma=1.0)
    aggregator = LogLinearPool()
    weighting = Examples()


class BarycentreW2(Method):
    """Train one shared Gaussian by IVON; fuse as the Wasserstein-2 barycentre."""

    name = "barycentre-w2"
    reference = f"{BARYCENTRES}, Wasserstein-2"
    inference = Ivon(prior_sigma=1.0)
    aggregator = Average(on="std")
    weighting = Examples()


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield IVON."""
    yield Ivon


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield FedIvon and the barycentres."""
    yield from (FedIvon, FedIvonPersonal, BarycentreRKL, BarycentreW2)
