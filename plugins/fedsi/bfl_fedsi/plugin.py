"""The methods `fedsi` and `fedsi-fac`, and the inference they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from bfl_fedsi.fedsi import SubnetworkLaplace
from bflcore import Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference


class FedSI(Method):
    """Share a body whose subnetwork is Gaussian; fine-tune a point-estimate head at the end."""

    name = "fedsi"
    reference = "Chen, Liu, Wu, Fan & Cao 2024, Algorithm 1"
    inference = "subnetwork-laplace"
    weighting = "equal"
    hyper = "continual"
    share = "body"
    defaults: ClassVar[Mapping[str, object]] = {
        "hyper.zero_variance": 0.0,  # left to inference.prior_variance: alpha has one place
        # Found on Fashion-MNIST; the README tells what each of them is worth.
        "rounds": 60,
        "inference.prior_variance": 0.1,
        "inference.head_lr": 3e-3,
        "inference.predict_select": "informative",
    }


class FedSIFac(Method):
    """FedSI with a diagonal covariance over the whole body."""

    name = "fedsi-fac"
    reference = "Chen, Liu, Wu, Fan & Cao 2024, section on ablations"
    inference = "subnetwork-laplace"
    weighting = "equal"
    hyper = "continual"
    share = "body"
    defaults: ClassVar[Mapping[str, object]] = {
        **FedSI.defaults,
        "inference.fraction": 1.0,
        "inference.covariance": "diagonal",
    }


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the subnetwork inference."""
    yield SubnetworkLaplace


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield FedSI and its factorised variant."""
    yield FedSI
    yield FedSIFac
