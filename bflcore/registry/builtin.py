"""The core's own components, registered through the same hooks as a plugin's."""

from __future__ import annotations

from collections.abc import Iterator

from bflcore.aggregation import Average, ProductOfChanges
from bflcore.data import DATASETS, PARTITIONERS
from bflcore.data.label_noise import Pair, Symmetric
from bflcore.engines.local import Local
from bflcore.hyper import Accumulate, Continual, EmpiricalBayes, Fixed
from bflcore.inference.point import Map
from bflcore.inference.variational import Variational
from bflcore.methods import FedAvg, FedVI
from bflcore.models import MODELS
from bflcore.options import Component
from bflcore.posteriors import DenseGaussian, Gaussian, LowRankGaussian, Point
from bflcore.problem.calibration import CALIBRATORS
from bflcore.problem.likelihoods import Categorical, GaussianNoise
from bflcore.registry.hookspecs import hookimpl
from bflcore.registry.loggers import CSV, MLflow, TensorBoard
from bflcore.weighting import Equal, Examples


@hookimpl
def bfl_methods() -> Iterator[type[Component]]:
    """Yield the core's methods."""
    yield from (FedAvg, FedVI)


@hookimpl
def bfl_posteriors() -> Iterator[type[Component]]:
    """Yield the core's posterior families."""
    yield from (Point, Gaussian, DenseGaussian, LowRankGaussian)


@hookimpl
def bfl_inferences() -> Iterator[type[Component]]:
    """Yield the core's inferences."""
    yield from (Map, Variational)


@hookimpl
def bfl_aggregators() -> Iterator[type[Component]]:
    """Yield the core's aggregators."""
    yield from (Average, ProductOfChanges)


@hookimpl
def bfl_weightings() -> Iterator[type[Component]]:
    """Yield the core's weightings."""
    yield from (Examples, Equal)


@hookimpl
def bfl_hyper_updates() -> Iterator[type[Component]]:
    """Yield the core's hyperparameter updates."""
    yield from (Fixed, Continual, EmpiricalBayes, Accumulate)


@hookimpl
def bfl_models() -> Iterator[type[Component]]:
    """Yield the core's models."""
    yield from MODELS


@hookimpl
def bfl_likelihoods() -> Iterator[type[Component]]:
    """Yield the core's likelihoods."""
    yield from (Categorical, GaussianNoise)


@hookimpl
def bfl_engines() -> Iterator[type[Component]]:
    """Yield the local engine."""
    yield Local


@hookimpl
def bfl_datasets() -> Iterator[type[Component]]:
    """Yield the core's data sets."""
    yield from DATASETS


@hookimpl
def bfl_partitioners() -> Iterator[type[Component]]:
    """Yield the core's partitions."""
    yield from PARTITIONERS


@hookimpl
def bfl_label_noises() -> Iterator[type[Component]]:
    """Yield the core's label noises."""
    yield from (Pair, Symmetric)


@hookimpl
def bfl_calibrators() -> Iterator[type[Component]]:
    """Yield the core's calibrators."""
    yield from CALIBRATORS


@hookimpl
def bfl_loggers() -> Iterator[type[Component]]:
    """Yield the core's loggers."""
    yield from (CSV, TensorBoard, MLflow)
