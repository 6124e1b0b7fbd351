"""The core's own components, registered through the same hooks as everyone's."""

from __future__ import annotations

from collections.abc import Iterator

from bflcore.aggregation import Aggregator, Average
from bflcore.data import DATASETS, PARTITIONERS
from bflcore.data.base import DataSource
from bflcore.data.label_noise import LabelNoise, Pair, Symmetric
from bflcore.data.partition import Partitioner
from bflcore.engines.base import Engine
from bflcore.engines.local import Local
from bflcore.hyper import Accumulate, Continual, EmpiricalBayes, Fixed, HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.inference.point import Map
from bflcore.inference.variational import Variational
from bflcore.methods import FedAvg, FedVI, Method
from bflcore.models import MODELS
from bflcore.models.base import Model
from bflcore.posteriors import Gaussian, Point, Posterior
from bflcore.problem.likelihoods import Categorical, GaussianNoise, Likelihood
from bflcore.registry.hookspecs import hookimpl
from bflcore.registry.loggers import CSV, Logger, MLflow, TensorBoard
from bflcore.weighting import Equal, Examples, Weighting


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the core's methods."""
    yield from (FedAvg, FedVI)


@hookimpl
def bfl_posteriors() -> Iterator[type[Posterior]]:
    """Yield the core's posterior families."""
    yield from (Point, Gaussian)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the core's inferences."""
    yield from (Map, Variational)


@hookimpl
def bfl_aggregators() -> Iterator[type[Aggregator]]:
    """Yield the core's aggregator."""
    yield Average


@hookimpl
def bfl_weightings() -> Iterator[type[Weighting]]:
    """Yield the core's weightings."""
    yield from (Examples, Equal)


@hookimpl
def bfl_hyper_updates() -> Iterator[type[HyperUpdate]]:
    """Yield the core's hyperparameter updates."""
    yield from (Fixed, Continual, EmpiricalBayes, Accumulate)


@hookimpl
def bfl_models() -> Iterator[type[Model]]:
    """Yield the core's models."""
    yield from MODELS


@hookimpl
def bfl_likelihoods() -> Iterator[type[Likelihood]]:
    """Yield the core's likelihoods."""
    yield from (Categorical, GaussianNoise)


@hookimpl
def bfl_engines() -> Iterator[type[Engine]]:
    """Yield the local engine."""
    yield Local


@hookimpl
def bfl_datasets() -> Iterator[type[DataSource]]:
    """Yield the core's data sets."""
    yield from DATASETS


@hookimpl
def bfl_partitioners() -> Iterator[type[Partitioner]]:
    """Yield the core's partitions."""
    yield from PARTITIONERS


@hookimpl
def bfl_label_noises() -> Iterator[type[LabelNoise]]:
    """Yield the core's label noises."""
    yield from (Pair, Symmetric)


@hookimpl
def bfl_loggers() -> Iterator[type[Logger]]:
    """Yield the core's loggers."""
    yield from (CSV, TensorBoard, MLflow)
