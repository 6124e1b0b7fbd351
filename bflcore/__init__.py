"""bflcore: a plugin framework for Bayesian federated learning.

Importing the package does not import torch; the names below that need it load when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bflcore.aggregation import (
    AdditiveAggregator,
    Aggregator,
    Average,
    Equal,
    Examples,
    Statistics,
    Weighting,
    check_weights,
)
from bflcore.errors import (
    BflError,
    ClientError,
    DataError,
    IncompatibleError,
    OptionError,
    PluginError,
    RunError,
)
from bflcore.hookspecs import hookimpl
from bflcore.hyper import Accumulate, Continual, EmpiricalBayes, Fixed, HyperUpdate
from bflcore.inference import (
    Broadcast,
    Cohort,
    GradientInference,
    LocalInference,
    LocalResult,
    Map,
    PointInference,
    Variational,
    VariationalInference,
)
from bflcore.layout import Layout
from bflcore.likelihoods import Categorical, GaussianNoise, Likelihood, Predictive
from bflcore.methods import FedAvg, FedVI, Method
from bflcore.options import Component, component, option
from bflcore.posteriors import Gaussian, Point, Posterior

if TYPE_CHECKING:
    from bflcore.problem import Problem, Shares

__version__ = "0.1.0"

__all__ = [
    "Accumulate",
    "AdditiveAggregator",
    "Aggregator",
    "Average",
    "BflError",
    "Broadcast",
    "Categorical",
    "ClientError",
    "Cohort",
    "Component",
    "Continual",
    "DataError",
    "EmpiricalBayes",
    "Equal",
    "Examples",
    "FedAvg",
    "FedVI",
    "Fixed",
    "Gaussian",
    "GaussianNoise",
    "GradientInference",
    "HyperUpdate",
    "IncompatibleError",
    "Layout",
    "Likelihood",
    "LocalInference",
    "LocalResult",
    "Map",
    "Method",
    "OptionError",
    "PluginError",
    "Point",
    "PointInference",
    "Posterior",
    "Predictive",
    "Problem",
    "RunError",
    "Shares",
    "Statistics",
    "Variational",
    "VariationalInference",
    "Weighting",
    "check_weights",
    "component",
    "hookimpl",
    "option",
]

_NEED_TORCH = {"Problem": "bflcore.problem", "Shares": "bflcore.problem"}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
