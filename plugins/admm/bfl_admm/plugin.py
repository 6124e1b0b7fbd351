"""The methods, and the hooks of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_admm.bayes import BayesianADMM
from bfl_admm.duals import DualUpdate
from bfl_admm.fedlap import FedLapInference
from bfl_aggregators.products import LogLinearPool
from bflcore import Equal, HyperUpdate, Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference


class BayesADMM(Method):
    """Come to agree on one Gaussian by duals with a mean and a precision (IVON-ADMM)."""

    name = "bayes-admm"
    reference = "Möllenhoff et al. 2026 (Bayesian ADMM), IVON-ADMM"
    inference = BayesianADMM(prior_sigma=1.0)
    aggregator = LogLinearPool()
    weighting = Equal()
    hyper = DualUpdate()


class FedLap(Method):
    """Come to agree on one network by duals; the server's network is the sum of the duals."""

    name = "fedlap"
    reference = "Swaroop et al. 2025 (FedLap), Algorithm 1"
    inference = FedLapInference()
    weighting = Equal()
    hyper = DualUpdate(server_step=1.0)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inferences with duals."""
    yield from (BayesianADMM, FedLapInference)


@hookimpl
def bfl_hyper_updates() -> Iterator[type[HyperUpdate]]:
    """Yield the server's step."""
    yield DualUpdate


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield Bayesian ADMM and FedLap."""
    yield from (BayesADMM, FedLap)
