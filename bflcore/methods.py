"""Methods: named recipes of the five parts with defaults and a citation."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

from bflcore.options import Component

__all__ = ["FedAvg", "FedVI", "Method"]


class Method(Component, abc.ABC):
    """Base of methods: a choice of parts by name, and defaults that differ from the parts' own.

    `defaults` is keyed like the command line: ``inference.kl_weight`` or ``rounds``. Defaults of
    a part that the user swaps for another are dropped with it.
    """

    kind: ClassVar[str] = "method"
    inference: ClassVar[str]
    aggregator: ClassVar[str] = "average"
    weighting: ClassVar[str] = "examples"
    hyper: ClassVar[str] = "fixed"
    share: ClassVar[str] = "all"
    defaults: ClassVar[Mapping[str, object]] = {}


class FedAvg(Method):
    """Train one shared point estimate by federated averaging."""

    name = "fedavg"
    reference = "McMahan et al. 2017, Algorithm 1"
    inference = "map"


class FedVI(Method):
    """Train one shared mean-field Gaussian under a fixed prior; fuse it by any rule.

    The defaults are the study's; `local-reparameterisation` is the faster estimator.
    """

    name = "fedvi"
    reference = "Fischer et al. 2024"
    inference = "variational"
    defaults: ClassVar[Mapping[str, object]] = {
        "inference.estimator": "flipout",
        "inference.lr_decay": 0.04,
        "inference.lr_decay_after": 50,
    }
