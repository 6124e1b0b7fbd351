"""From settings to a problem: load and divide the data, build the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from bflcore.data import Dataset, Partition, centred, divide, encoded
from bflcore.data.foreign import automatic, foreign_samples
from bflcore.data.label_noise import mislabelled
from bflcore.data.partition import Natural, hold_back
from bflcore.data.user import MEMORY, OwnData
from bflcore.errors import DataError, OptionError
from bflcore.experiments.description import Description
from bflcore.experiments.rehearsal import rehearse
from bflcore.files import memory
from bflcore.layout import Layout
from bflcore.lazy import lazy
from bflcore.models.digests import source_digests
from bflcore.models.user import UserModel
from bflcore.problem import Problem
from bflcore.problem.likelihoods import Likelihood, default_likelihood
from bflcore.randomness import SERVER, numpy_stream, seeded_globally

if TYPE_CHECKING:
    import torch

    from bflcore.data.tables import Table
    from bflcore.data.user import Arrays
    from bflcore.experiments.resolve import Experiment
    from bflcore.models import networks
    from bflcore.models.base import Model
    from bflcore.options.settings import RunSettings
else:
    torch = lazy("torch")
    networks = lazy("bflcore.models.networks")

__all__ = ["Prepared", "assemble", "build_problem", "load_dataset", "prepare"]


@attrs.frozen(eq=False)
class Prepared:
    """An experiment with its data, loaded and divided among the clients, and its network.

    `notes` say how the data were understood where the user left that open.
    """

    experiment: Experiment
    partition: Partition
    problem: Problem
    description: Description
    notes: tuple[str, ...] = ()
    foreign: str = ""  # what --ood stands for
    sources: Mapping[str, str] = attrs.field(factory=dict)  # digests; see `source_digests`


def prepare(experiment: Experiment, given: Table | Arrays | None = None) -> Prepared:
    """Load and divide the data, and build the network; nothing is written.

    `given` are a user's own data where Python holds them. Raises `DataError` or `OptionError`.
    """
    _device(experiment.run.device)
    sources = source_digests(experiment.dataset, experiment.data, experiment.model, given)
    dataset = load_dataset(experiment, given)
    experiment, notes = _with_owners(_with_absolute_paths(experiment), dataset)
    run, data = experiment.run, experiment.data
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
    fractions = {
        "validation": data.validation_fraction,
        "calibration": data.calibration_fraction,
    }
    partition = hold_back(dataset, partition, run.seed, **fractions)
    for purpose, fraction in fractions.items():
        if fraction and not any(map(len, getattr(partition, purpose))):
            raise DataError(
                f"--{purpose}-fraction: no client has two training samples; leave it out, or use "
                "fewer --clients"
            )
    trained = data.clients - data.novel_clients
    rows = np.concatenate(partition.train[:trained])
    dataset = encoded(dataset, rows, references=experiment.model.interpretable)
    if experiment.label_noise:
        dataset = mislabelled(
            dataset,
            experiment.label_noise,
            np.concatenate(partition.train),
            numpy_stream(run.seed, SERVER, SERVER, "label noise"),
        )
    prepared = assemble(experiment, dataset, partition)
    prepared = attrs.evolve(prepared, notes=dataset.notes + notes, sources=sources)
    name, foreign = _foreign(experiment, dataset)
    if foreign is None:
        return prepared
    like = prepared.problem.train.x
    samples = torch.as_tensor(foreign).to(like.device, like.dtype)
    problem = attrs.evolve(prepared.problem, foreign=samples)
    return attrs.evolve(prepared, problem=problem, foreign=name)


def load_dataset(experiment: Experiment, given: Table | Arrays | None = None) -> Dataset:
    """Load the data, downloading them if that is asked for; `given` are those that Python holds.

    Raises `DataError` or `OptionError`.
    """
    data = experiment.data
    if isinstance(experiment.dataset, OwnData):
        chosen = experiment.likelihood
        if chosen and data.task and data.task != chosen.task:
            raise OptionError(
                f"--task: {data.task} does not fit --likelihood {chosen.name}, which is for "
                f"{chosen.task}; leave one of the two out"
            )
        return experiment.dataset.read(given, data, chosen.task if chosen else data.task)
    folder = Path(data.data_dir) if data.data_dir else None
    if folder is not None and not folder.is_dir() and not data.download:
        raise DataError(
            f"--data-dir: {folder} is not a folder; give the folder that holds {data.data}, "
            "or add --download to fetch it there"
        )
    return experiment.dataset.load(folder, data.download)


def assemble(experiment: Experiment, dataset: Dataset, partition: Partition) -> Prepared:
    """Combine divided data with the experiment's network.

    The network's shape and initial values depend on the data's shape and the seed alone, so that
    nodes with only some clients' samples, or none, build the same network.
    """
    run, model = experiment.run, experiment.model
    likelihood = _likelihood(experiment, dataset)
    for one in experiment.calibrators:
        if dataset.task not in one.tasks:
            raise OptionError(
                f"--calibrate: {one.name} is for {one.tasks[0]}, but {experiment.data.data} is a "
                f"{dataset.task}; choose others (bfl list calibrator)"
            )
    novel = experiment.data.novel_clients
    problem = build_problem(run, model, likelihood, dataset, partition, novel=novel)
    problem = attrs.evolve(problem, calibrators=experiment.calibrators)
    for shares in problem.samples.values():
        model.check_samples(shares.x)
        likelihood.check_targets(shares.y)
    samples = problem.initial.new_zeros(2, *dataset.x.shape[1:])
    samples[: len(problem.train.x)] = problem.train.x[:2].nan_to_num(0.0)
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
    shape, outputs = tuple(dataset.x.shape[1:]), likelihood.outputs(dataset.outputs)
    _check_size(model, shape, outputs, torch.empty(0, dtype=getattr(torch, run.dtype)))
    with seeded_globally(run.seed, "initialisation"):
        network = model.network(shape, outputs)
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


def _check_size(model: Model, shape: tuple[int, ...], outputs: int, like: torch.Tensor) -> None:
    """Raise `OptionError` if a built-in model's parameters, of the type of `like`, do not fit."""
    if isinstance(model, UserModel):
        return
    with torch.device("meta"):  # shapes alone
        try:
            network = model.network(shape, outputs)
        except RuntimeError as error:
            raise OptionError(
                f"model {model.name}: {str(error).splitlines()[0]}; choose a smaller network "
                f"(bfl show model {model.name})"
            ) from None
    count = sum(parameter.numel() for parameter in network.parameters())
    need, allowed = count * like.element_size(), memory() // 2
    if need > allowed:
        raise OptionError(
            f"model {model.name}: its {count:,} parameters need {need / 2**30:,.1f} GiB; allowed: "
            f"{allowed / 2**30:,.1f} GiB, half of this machine's memory; choose a smaller network "
            f"(bfl show model {model.name})"
        )


def _with_absolute_paths(experiment: Experiment) -> Experiment:
    """Let the experiment, as it is stored, be run from any folder."""
    data = experiment.data
    if isinstance(experiment.dataset, OwnData) and data.data != MEMORY:
        data = data.replace(data=str(Path(data.data).absolute()))
    if data.data_dir:
        data = data.replace(data_dir=str(Path(data.data_dir).absolute()))
    return attrs.evolve(experiment, data=data)


def _with_owners(experiment: Experiment, dataset: Dataset) -> tuple[Experiment, tuple[str, ...]]:
    """Let the clients be the owners where the user left that open, and say so."""
    data, notes = experiment.data, list[str]()
    own, chosen = isinstance(experiment.dataset, OwnData), "partition" in experiment.asked
    if dataset.client is None:
        return experiment.with_clients(data.clients), ()
    owners = [dataset.owner(int(number)) for number in np.unique(dataset.client)]
    if own and not chosen:
        experiment = attrs.evolve(experiment, partition=Natural())
        notes.append(
            f"partition: natural, the {len(owners)} owners are the clients; --partition iid mixes "
            "their samples"
        )
    elif own and not experiment.partition.by_owner:
        notes.append(
            f"partition: {experiment.partition.name} does not use the {len(owners)} owners of the "
            "samples; --partition natural does"
        )
    if experiment.partition.by_owner and dataset.x_test is not None and dataset.client_test is None:
        notes.append(
            "client_test is missing: test samples are dealt to the owners in proportion to their "
            "classes"
        )
    if not experiment.partition.by_owner:
        return experiment.with_clients(data.clients), tuple(notes)
    if "clients" not in experiment.asked:
        return experiment.with_clients(len(owners)), tuple(notes)
    if data.clients < len(owners):
        named = ", ".join(map(str, owners[: data.clients][:10]))
        more = ", ..." if data.clients > 10 else ""
        notes.append(f"--clients: {data.clients} of {len(owners)} owners are used: {named}{more}")
    return experiment, tuple(notes)


def _foreign(experiment: Experiment, dataset: Dataset) -> tuple[str, Any]:
    """Return what --ood stands for, and its samples ``[N, ...]``; None without."""
    name, source = experiment.data.ood, experiment.ood
    if name == "auto":
        source = automatic(dataset)
        name = source.name if source else "none"
    if name == "none":
        return "", None
    if source is not None and source.name == dataset.name:
        raise OptionError(f"--ood: {name} is the data set itself; give another one, or none")
    rng = numpy_stream(experiment.run.seed, SERVER, SERVER, "out of distribution")
    centre = experiment.data.input_range == "-1,1"
    return name, foreign_samples(name, source, dataset, rng, centre=centre)


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
        torch.zeros(1, device=device).item()  # a device without values, such as meta, is of no use
    except (RuntimeError, AssertionError):
        found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise OptionError(f"--device: {name!r} is not available here; allowed: {found}") from None
    return device
