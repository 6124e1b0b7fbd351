"""Running an experiment: from settings to a problem, and from round to round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.engines.faults import unreliable
from bflcore.errors import DataError, OptionError, RunError
from bflcore.rounds import Recipe, begin, run_round, sample_cohort
from bflcore.run_directory import RunDirectory, default_directory
from bflcore.summary import Record, Summary

if TYPE_CHECKING:
    from bflcore.checkpoint import Checkpoint, Checkpoints
    from bflcore.data.base import Dataset
    from bflcore.data.partition import Partition
    from bflcore.engines.base import Session
    from bflcore.experiment import Experiment
    from bflcore.problem import Problem

__all__ = ["Prepared", "RunDirectory", "assemble", "default_directory", "execute", "prepare"]

Progress = Callable[[int, float, "Record | None"], None]


@attrs.frozen(eq=False)
class Prepared:
    """An experiment with its data loaded, divided, and put together with a network."""

    experiment: Experiment
    partition: Partition
    problem: Problem


def prepare(experiment: Experiment) -> Prepared:
    """Load and divide the data, build the network. Raises before anything is written."""
    import numpy as np

    from bflcore.data import divide, standardised
    from bflcore.data.label_noise import mislabelled
    from bflcore.randomness import SERVER, numpy_stream

    run, data = experiment.run, experiment.data
    _device(run.device)
    dataset = _dataset(experiment)
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
    if experiment.label_noise:
        dataset = mislabelled(
            dataset,
            experiment.label_noise,
            np.concatenate(partition.train),
            numpy_stream(run.seed, SERVER, SERVER, "label noise"),
        )
    if dataset.standardise:
        dataset = standardised(dataset, np.concatenate(partition.train))
    return assemble(experiment, dataset, partition)


def assemble(experiment: Experiment, dataset: Dataset, partition: Partition) -> Prepared:
    """Put divided data and the experiment's network together.

    The network's shape and start come from the data's shape and the seed alone, so whoever holds
    only some clients' samples, or none, makes the same.
    """
    import torch

    from bflcore.layout import Layout
    from bflcore.models.networks import refuse_running_buffers
    from bflcore.problem import Problem
    from bflcore.randomness import seeded_globally

    run = experiment.run
    likelihood = _likelihood(experiment, dataset)
    with seeded_globally(run.seed, "initialisation"):
        network = experiment.model.network(tuple(dataset.x.shape[1:]), dataset.outputs)
    refuse_running_buffers(network)
    problem = Problem.assemble(
        dataset,
        partition,
        network,
        Layout.of(network, experiment.model.head(network), run.share),
        likelihood,
        novel=experiment.data.novel_clients,
        seed=run.seed,
        rounds=run.rounds,
        device=_device(run.device),
        dtype=getattr(torch, run.dtype),
    )
    experiment.inference.check(problem)
    return Prepared(attrs.evolve(experiment, likelihood=likelihood), partition, problem)


def execute(
    prepared: Prepared,
    directory: RunDirectory,
    progress: Progress = lambda *_: None,
    session: Session | None = None,
) -> Record:
    """Run every round that is left, evaluate, write everything; return the summary.

    A directory with a checkpoint goes on from there, bit for bit. `progress` is called after
    each round with its number, its training loss, and the record of its evaluation if there was
    one; pre-training is round 0. `session`: clients that are at work already, in place of those
    that the experiment's engine would start. Raises `RunError` when too few clients gave a usable
    result, or when the checkpoint cannot be read or written.
    """
    with directory.held(), directory.checkpoints as checkpoints:
        result = Run(prepared, directory, checkpoints, progress).finished(session)
    directory.write_json("summary.json", result)
    return result


class Run:
    """A run between two rounds: the server's state, the counters, and where they are kept."""

    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        progress: Progress,
    ) -> None:
        self.experiment, self.problem = prepared.experiment, prepared.problem
        self.directory, self.checkpoints, self.progress = directory, checkpoints, progress
        experiment = self.experiment
        self.recipe = Recipe(
            experiment.inference, experiment.aggregator, experiment.weighting, experiment.hyper
        )
        self.summary = Summary(experiment.method)
        self.broadcast = begin(self.recipe, self.problem)

    def finished(self, given: Session | None = None) -> Record:
        """Restore what there is, run the rounds that are left, and return the summary."""
        run, problem = self.experiment.run, self.problem
        saved = self._restored()
        every = run.eval_every or max(1, run.rounds // 20)
        engine, inference = self.experiment.engine, self.experiment.inference
        with nullcontext(given) if given else engine.open(problem, inference, run.bins) as opened:
            opened.restore(saved.memories if saved else {})
            session = unreliable(opened, run.seed, run.drop_out, run.corrupt)
            if saved is None:
                self._pretrain(session)
                self._keep(session)
            for number in range(self.broadcast.round + 1, run.rounds + 1):
                clients = sample_cohort(
                    problem.clients, run.cohort or len(problem.clients), run.seed, number - 1
                )
                done = run_round(self.recipe, session, self.broadcast, clients, run.min_clients)
                self.broadcast = done.broadcast
                self.summary.count(number, done)
                record = None
                if number % every == 0 or number == run.rounds:
                    record = self._evaluate(session, number, done.loss, done.report)
                if number % run.checkpoint_every == 0 or number == run.rounds:
                    self._keep(session)
                self.progress(number, done.loss, record)
        return self.summary.finish()

    def _restored(self) -> Checkpoint | None:
        """Take back what the newest checkpoint holds, and nothing that came after it."""
        saved = self.checkpoints.read(type(self.broadcast.start), self.problem.device)
        reached = saved.broadcast.round if saved else -1
        records = self.directory.rewind(reached)
        for logger in self.experiment.loggers:
            logger.rewind(self.directory.path, reached)
        if saved is None:
            return None
        for name, tensor in self.broadcast.start.pack().items():
            found = saved.broadcast.start.pack()[name]
            if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(
                    f"{self.checkpoints.folder}: {name} is {found.dtype} {list(found.shape)}, but "
                    f"the model needs {tensor.dtype} {list(tensor.shape)}; run it again"
                )
        if len(records) != saved.state["evaluated"]:
            raise RunError(
                f"{self.directory.metrics}: {len(records)} of {saved.state['evaluated']} evaluated "
                f"rounds up to round {reached} are left; put the file back, or run it again"
            )
        self.broadcast = saved.broadcast
        self.summary.restore(saved.state, records)
        return saved

    def _pretrain(self, session: Session) -> None:
        fraction = self.experiment.run.pretrain
        if fraction:
            self.broadcast, loss = self.summary.pretrained(
                self.recipe, self.problem, self.broadcast, fraction
            )
            self.progress(0, loss, self._evaluate(session, 0, loss, {}))

    def _evaluate(
        self, session: Session, number: int, loss: float, report: Mapping[str, float]
    ) -> Record:
        record = self.summary.evaluated(number, loss, report, session, self.broadcast, self.problem)
        self.directory.append(record)
        for logger in self.experiment.loggers:
            logger.log(self.directory.path, record)
        self.directory.write_json("evaluation.json", self.summary.evaluation)
        return record

    def _keep(self, session: Session) -> None:
        written = [path for path in (self.directory.metrics,) if path.exists()]
        self.checkpoints.write(
            self.broadcast, session.memories, self.summary.state(), after=written
        )


def _dataset(experiment: Experiment) -> Dataset:
    data = experiment.data
    folder = Path(data.data_dir) if data.data_dir else None
    if experiment.source is None:
        from bflcore.data.user import load_npz

        return load_npz(Path(data.data))
    if folder is not None and not folder.is_dir() and not data.download:
        raise DataError(
            f"--data-dir: {folder} is no folder; give the folder that holds {data.data}, "
            "or add --download to fetch it there"
        )
    return experiment.source.load(folder, data.download)


def _likelihood(experiment: Experiment, dataset: Dataset) -> Any:
    from bflcore.likelihoods import LIKELIHOODS

    suiting = next(part for part in LIKELIHOODS.values() if part.task == dataset.task)
    chosen = experiment.likelihood or suiting()
    if chosen.task != dataset.task:
        raise OptionError(
            f"--likelihood: {chosen.name} is for {chosen.task}, but {experiment.data.data} is a "
            f"{dataset.task}; allowed: {suiting.name}"
        )
    return chosen


def _device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        cuda = torch.cuda.device_count()
        found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(cuda))])
        raise OptionError(f"--device: {name!r} is not available here; allowed: {found}") from None
    return device
