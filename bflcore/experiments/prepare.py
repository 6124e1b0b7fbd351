"""From settings to a problem: load and divide the data, build the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from bflcore.data import Dataset, Partition, centred, divide
from bflcore.data.label_noise import mislabelled
from bflcore.data.partition import validated
from bflcore.data.user import load_npz
from bflcore.errors import DataError, OptionError
from bflcore.experiments.description import Description
from bflcore.experiments.rehearsal import rehearse
from bflcore.layout import Layout
from bflcore.lazy import lazy
from bflcore.models.user import UserModel
from bflcore.problem import Problem
from bflcore.problem.likelihoods import Likelihood, default_likelihood
from bflcore.randomness import SERVER, numpy_stream, seeded_globally

if TYPE_CHECKING:
    import torch

    from bflcore.experiments.resolve import Experiment
    from bflcore.models import networks
    from bflcore.models.base import Model
    from bflcore.options.settings import RunSettings
else:
    torch = lazy("torch")
    networks = lazy("bflcore.models.networks")

__all__ = ["Prepared", "assemble", "build_problem", "prepare"]


@attrs.frozen(eq=False)
class Prepared:
    """An experiment with its data, loaded and divided among the clients, and its network."""

    experiment: Experiment
    partition: Partition
    problem: Problem
    description: Description


def prepare(experiment: Experiment) -> Prepared:
    """Load and divide the data, and build the network; nothing is written.

    Raises `DataError` or `OptionError`.
    """
    run, data = experiment.run, experiment.data
    _device(run.device)
    dataset = _dataset(experiment)
    if data.input_range == "-1,1":
        dataset = centred(dataset)
    _likelihood(experiment, dataset)
    partition = divide(
        dataset,
        experiment.partition,
        data.clients,
        numpy_stream(run.seed, SERVER, SERVER, "partition"),
        train_per_class=data.train_per_class,
        test_per_class=data.test_per_class,
        test_fraction=data.test_fraction,
    )
    if data.validation_fraction:
        partition = validated(dataset, partition, data.validation_fraction, run.seed)
        if not any(map(len, partition.validation)):
            raise DataError(
                "--validation-fraction: no client has two training samples; leave it out, or use "
                "fewer --clients"
            )
    if experiment.label_noise:
        dataset = mislabelled(
            dataset,
            experiment.label_noise,
            np.concatenate(partition.train),
            numpy_stream(run.seed, SERVER, SERVER, "label noise"),
        )
    return assemble(experiment, dataset, partition)


def assemble(experiment: Experiment, dataset: Dataset, partition: Partition) -> Prepared:
    """Combine divided data with the experiment's network.

    The network's shape and initial values depend on the data's shape and the seed alone, so that
    nodes with only some clients' samples, or none, build the same network.
    """
    run, model = experiment.run, experiment.model
    likelihood = _likelihood(experiment, dataset)
    novel = experiment.data.novel_clients
    problem = build_problem(run, model, likelihood, dataset, partition, novel=novel)
    for shares in problem.samples:
        model.check_samples(shares.x)
    samples = problem.initial.new_zeros(2, *dataset.x.shape[1:])
    samples[: len(problem.train.x)] = problem.train.x[:2]
    networks.check_network(problem.network, samples)
    experiment.inference.check(problem)
    if isinstance(model, UserModel):
        rehearse(experiment, problem)
    described = Description.of(experiment, dataset, partition)
    return Prepared(attrs.evolve(experiment, likelihood=likelihood), partition, problem, described)


def build_problem(
    run: RunSettings,
    model: Model,
    likelihood: Likelihood,
    dataset: Dataset,
    partition: Partition,
    *,
    novel: int = 0,
) -> Problem:
    """Combine divided data, or data without samples, with the network of a run."""
    with seeded_globally(run.seed, "initialisation"):
        network = model.network(tuple(dataset.x.shape[1:]), dataset.outputs)
    return Problem.assemble(
        dataset,
        partition,
        network,
        Layout.of(network, model.head(network), run.share),
        likelihood,
        novel=novel,
        seed=run.seed,
        rounds=run.rounds,
        device=_device(run.device),
        dtype=getattr(torch, run.dtype),
    )


def _dataset(experiment: Experiment) -> Dataset:
    data = experiment.data
    if experiment.dataset is None:
        return load_npz(Path(data.data))
    folder = Path(data.data_dir) if data.data_dir else None
    if folder is not None and not folder.is_dir() and not data.download:
        raise DataError(
            f"--data-dir: {folder} is not a folder; give the folder that holds {data.data}, "
            "or add --download to fetch it there"
        )
    return experiment.dataset.load(folder, data.download)


def _likelihood(experiment: Experiment, dataset: Dataset) -> Likelihood:
    suiting = default_likelihood(dataset.task)
    chosen = experiment.likelihood or suiting
    if chosen.task != dataset.task:
        raise OptionError(
            f"--likelihood: {chosen.name} is for {chosen.task}, but {experiment.data.data} is a "
            f"{dataset.task}; allowed: {suiting.name}"
        )
    return chosen


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise OptionError(f"--device: {name!r} is not available here; allowed: {found}") from None
    return device
