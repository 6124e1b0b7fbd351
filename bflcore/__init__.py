"""bflcore: a plugin framework for Bayesian federated learning.

Importing the package does not import torch: it loads when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bflcore.aggregation import (
    AdditiveAggregator,
    Aggregator,
    Average,
    ProductOfChanges,
    Statistics,
)
from bflcore.api import (
    ClassPrediction,
    ClientModel,
    Prediction,
    Run,
    TargetPrediction,
    load,
    load_model,
    resume,
    run,
)
from bflcore.data.base import Dataset, DataSource
from bflcore.data.label_noise import LabelNoise
from bflcore.data.partition import Partitioner
from bflcore.engines.base import Engine, Session
from bflcore.errors import (
    BflError,
    ClientError,
    DataError,
    IncompatibleError,
    OptionError,
    PluginError,
    RunError,
)
from bflcore.hyper import Accumulate, Continual, EmpiricalBayes, Fixed, HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.inference.gradient import GradientInference
from bflcore.inference.point import Map, PointInference
from bflcore.inference.sites import SiteInference
from bflcore.inference.variational import Variational, VariationalInference
from bflcore.layout import Layout
from bflcore.messages import Broadcast, Cohort, LocalResult
from bflcore.methods import FedAvg, FedVI, Method
from bflcore.models.base import Model
from bflcore.options import Component, component, option
from bflcore.posteriors import (
    DenseGaussian,
    ExponentialFamily,
    Gaussian,
    LowRankGaussian,
    Point,
    Posterior,
)
from bflcore.problem import Problem, Shares
from bflcore.problem.calibration.base import Calibrator
from bflcore.problem.likelihoods import Categorical, GaussianNoise, Likelihood, Predictive
from bflcore.registry.command import Command
from bflcore.registry.hookspecs import hookimpl
from bflcore.registry.loggers import Logger
from bflcore.weighting import Equal, Examples, Weighting, check_weights

if TYPE_CHECKING:
    from bflcore.api.estimators import BayesianFederatedClassifier as BayesianFederatedClassifier
    from bflcore.api.estimators import BayesianFederatedRegressor as BayesianFederatedRegressor
    from bflcore.studies.reproduce import reproduce
    from bflcore.studies.sweeps import sweep

__version__ = "0.2.0"

__all__ = [
    "Accumulate", "AdditiveAggregator", "Aggregator", "Average", "BflError", "Broadcast",
    "Calibrator", "Categorical", "ClassPrediction", "ClientError", "ClientModel", "Cohort",
    "Command", "Component", "Continual", "DataError", "DataSource", "Dataset", "DenseGaussian",
    "EmpiricalBayes", "Engine", "Equal", "Examples", "ExponentialFamily", "FedAvg", "FedVI",
    "Fixed", "Gaussian", "GaussianNoise", "GradientInference", "HyperUpdate", "IncompatibleError",
    "LabelNoise", "Layout", "Likelihood", "LocalInference", "LocalResult", "Logger",
    "LowRankGaussian", "Map", "Method", "Model", "OptionError", "Partitioner", "PluginError",
    "Point", "PointInference", "Posterior", "Prediction", "Predictive", "Problem",
    "ProductOfChanges", "Run", "RunError", "Session", "Shares", "SiteInference", "Statistics",
    "TargetPrediction", "Variational", "VariationalInference", "Weighting", "check_weights",
    "component", "hookimpl", "load", "load_model", "option", "reproduce", "resume", "run", "sweep",
]  # fmt: skip

# Not in __all__: these two need scikit-learn, an extra, and are imported when first used.
_ESTIMATORS = ("BayesianFederatedClassifier", "BayesianFederatedRegressor")

# Studies of many runs, imported when first used: name -> module.
_STUDIES = {"reproduce": "bflcore.studies.reproduce", "sweep": "bflcore.studies.sweeps"}


def __getattr__(name: str) -> Any:
    if name in _STUDIES:
        return getattr(importlib.import_module(_STUDIES[name]), name)
    if name not in _ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from bflcore.api import estimators
    except ImportError as error:
        raise ImportError(
            f"bflcore.{name} needs scikit-learn 1.6 or later: pip install 'bflcore[sklearn]'"
        ) from error
    return getattr(estimators, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ESTIMATORS, *_STUDIES})
