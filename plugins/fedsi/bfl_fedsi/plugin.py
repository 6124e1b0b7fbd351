"""The methods `fedsi` and `fedsi-fac`, and their common inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_fedsi.fedsi import SubnetworkLaplace
from bflcore import Continual, Equal, Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference


class FedSI(Method):
    """Share a body with a Gaussian subnetwork; fine-tune a point-estimate head at the end."""

    name = "fedsi"
    reference = "Chen, Liu, Wu, Fan & Cao 2024, Algorithm 1"
    # Options and rounds were chosen on Fashion-MNIST; the README reports the effect of each.
    inference = SubnetworkLaplace(prior_variance=0.1, head_lr=3e-3, predict_select="informative")
    weighting = Equal()
    hyper = Continual(zero_variance=0.0)  # 0 leaves alpha to inference.prior_variance
    share = "body"
    settings = {"rounds": 60}


class FedSIFac(Method):
    """Run FedSI with a diagonal covariance over the whole body."""

    name = "fedsi-fac"
    reference = "Chen, Liu, Wu, Fan & Cao 2024, section on ablations"
    inference = FedSI.inference.replace(fraction=1.0, covariance="diagonal")
    weighting = FedSI.weighting
    hyper = FedSI.hyper
    share = FedSI.share
    settings = FedSI.settings


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the subnetwork inference."""
    yield SubnetworkLaplace


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield FedSI and its factorised variant."""
    yield FedSI
    yield FedSIFac
