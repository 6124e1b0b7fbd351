"""The method `swag`, and the hooks that register it and its inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_swag.swag import SWAG
from bflcore import Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference


class FederatedSWAG(Method):
    """Fuse the Gaussians that clients fit to their gradient descent trajectories."""

    name = "swag"
    reference = (
        "Maddox, Garipov, Izmailov, Vetrov & Wilson 2019, federated by averaging; "
        "this combination is new"
    )
    inference = SWAG(optimiser="sgd", lr=0.05, momentum=0.9)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference."""
    yield SWAG


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method."""
    yield FederatedSWAG
