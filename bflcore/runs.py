"""Running an experiment, and the run directory that keeps it."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import tomli_w

from bflcore.errors import ClientError, DataError, OptionError, RunError
from bflcore.rounds import Recipe, Round, begin, run_round, sample_cohort

if TYPE_CHECKING:
    from bflcore.data.base import Dataset
    from bflcore.data.partition import Partition
    from bflcore.engines.base import Evaluation, Session
    from bflcore.experiment import Experiment
    from bflcore.inference import Broadcast
    from bflcore.problem import Problem
    from bflcore.registry import Registry

__all__ = ["Prepared", "RunDirectory", "execute", "prepare"]

Record = dict[str, Any]
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
    import torch

    from bflcore.data import divide, standardised
    from bflcore.data.label_noise import mislabelled
    from bflcore.layout import Layout
    from bflcore.models.networks import refuse_running_buffers
    from bflcore.problem import Problem
    from bflcore.randomness import SERVER, numpy_stream, seeded_globally

    run, data = experiment.run, experiment.data
    device = _device(run.device)
    dataset = _dataset(experiment)
    likelihood = _likelihood(experiment, dataset)
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
    with seeded_globally(run.seed, "initialisation"):
        network = experiment.model.network(tuple(dataset.x.shape[1:]), dataset.outputs)
    refuse_running_buffers(network)
    problem = Problem.assemble(
        dataset,
        partition,
        network,
        Layout.of(network, experiment.model.head(network), run.share),
        likelihood,
        novel=data.novel_clients,
        seed=run.seed,
        rounds=run.rounds,
        device=device,
        dtype=getattr(torch, run.dtype),
    )
    experiment.inference.check(problem)
    return Prepared(attrs.evolve(experiment, likelihood=likelihood), partition, problem)


def execute(
    prepared: Prepared, directory: RunDirectory, progress: Progress = lambda *_: None
) -> Record:
    """Run every round, evaluate, write everything; return the summary.

    `progress` is called after each round with its number, its training loss, and the record of
    its evaluation if there was one; pre-training is round 0.
    """
    experiment, problem = prepared.experiment, prepared.problem
    run = experiment.run
    recipe = Recipe(
        experiment.inference, experiment.aggregator, experiment.weighting, experiment.hyper
    )
    every = run.eval_every or max(1, run.rounds // 20)
    broadcast = begin(recipe, problem)
    summary = Summary(experiment.method)

    def evaluated(number: int, loss: float, report: Mapping[str, float]) -> Record:
        record = summary.evaluated(number, loss, report, session, broadcast, problem)
        directory.append(record)
        for logger in experiment.loggers:
            logger.log(directory.path, record)
        directory.write_json("evaluation.json", summary.evaluation)
        return record

    with experiment.engine.open(problem, experiment.inference, run.bins) as session:
        if run.pretrain:
            broadcast, loss = summary.pretrained(recipe, problem, broadcast, run.pretrain)
            progress(0, loss, evaluated(0, loss, {}))
        for number in range(1, run.rounds + 1):
            clients = sample_cohort(
                problem.clients, run.cohort or len(problem.clients), run.seed, broadcast.round
            )
            done = run_round(recipe, session, broadcast, clients, run.min_clients)
            broadcast = done.broadcast
            summary.count(number, done)
            record = None
            if number % every == 0 or number == run.rounds:
                record = evaluated(number, done.loss, done.report)
            progress(number, done.loss, record)
        directory.write_checkpoint(broadcast, getattr(session, "memories", {}))
    result = summary.finish()
    directory.write_json("summary.json", result)
    return result


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


class Summary:
    """Accumulates what a run reports."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.records: list[Record] = []
        self.evaluation: Record = {}
        self.seconds = {"clients": 0.0, "server": 0.0, "evaluation": 0.0}
        self.bytes = {"up": 0, "down": 0}
        self.dropped: list[Record] = []
        self._fresh: list[Record] = []
        self._began = time.perf_counter()

    def count(self, number: int, done: Round) -> None:
        """Take in what a round cost and whom it dropped."""
        self.seconds["clients"] += done.client_seconds
        self.seconds["server"] += done.server_seconds
        self.bytes["up"] += done.bytes_up
        self.bytes["down"] += done.bytes_down
        self._drop(number, done.dropped)

    def pretrained(
        self, recipe: Recipe, problem: Problem, broadcast: Broadcast, fraction: float
    ) -> tuple[Broadcast, float]:
        """Pre-train, and take in what that cost."""
        from bflcore.pretraining import pretrain

        clock = time.perf_counter()
        found = pretrain(recipe, problem, broadcast, fraction)
        self.seconds["pretraining"] = time.perf_counter() - clock
        return found

    def evaluated(
        self,
        number: int,
        loss: float,
        report: Mapping[str, float],
        session: Session,
        broadcast: Broadcast,
        problem: Problem,
    ) -> Record:
        """Evaluate every client and return the line for ``metrics.jsonl``."""
        clock = time.perf_counter()
        replies = list(session.evaluate(broadcast, (*problem.clients, *problem.novel)))
        found = [reply for reply in replies if not isinstance(reply, ClientError)]
        self._drop(number, [reply for reply in replies if isinstance(reply, ClientError)])
        groups = _groups(found, problem.novel)
        self.seconds["evaluation"] += time.perf_counter() - clock
        from bflcore import metrics

        record: Record = {"round": number, "train.loss": loss}
        record |= {f"aggregator.{name}": figure for name, figure in report.items()}
        for group, members in groups.items():
            figures = metrics.summarise([sums for _, sums in members])
            for name, figure in figures.items():
                record[f"{group}.{name}"] = figure
        record |= {
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "bytes": dict(self.bytes),
            "dropped": self._fresh,
        }
        self._fresh = []
        self.evaluation = {"round": number} | {
            group: _detail(members) for group, members in groups.items()
        }
        if curves := _curves([e for e in found if e.client not in problem.novel]):
            self.evaluation["curves"] = curves
        self.records.append(record)
        return record

    def finish(self) -> Record:
        """Return ``summary.json``."""
        key = "personal.accuracy" if "personal.accuracy" in self.records[-1] else "personal.rmse"
        sign = 1 if key.endswith("accuracy") else -1
        best = max(self.records, key=lambda r: sign * r.get(key, {"mean": -sign * 1e30})["mean"])
        total = time.perf_counter() - self._began
        return {
            "method": self.method,
            "rounds": self.records[-1]["round"],
            "final": _figures(self.records[-1]),
            "best": {
                **_figures(best),
                "chosen": f"the evaluated round with the best {key}, chosen on test data",
            },
            "seconds": {"total": round(total, 4)}
            | {name: round(value, 4) for name, value in self.seconds.items()},
            "bytes": self.bytes,
            "dropped": self.dropped,
        }

    def _drop(self, number: int, failures: Sequence[ClientError]) -> None:
        entries = [
            {"round": number, "client": f.client, "stage": f.stage, "reason": f.reason}
            for f in failures
        ]
        self.dropped += entries
        self._fresh += entries


def _groups(
    found: Sequence[Evaluation], novel: Sequence[int]
) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Divide evaluations: clients' own models, the server's model, clients held out of training."""
    trained = [e for e in found if e.client not in novel]
    groups = {
        "personal": [(e.client, e.personal) for e in trained],
        "global": [(e.client, e.shared) for e in trained if e.shared is not None],
        "novel": [(e.client, e.personal) for e in found if e.client in novel],
    }
    return {name: members for name, members in groups.items() if members}


def _detail(members: Sequence[tuple[int, Mapping[str, Any]]]) -> Record:
    from functools import reduce

    from bflcore import metrics

    total = reduce(metrics.add, [dict(sums) for _, sums in members])
    detail: Record = {
        "clients": [
            {"client": client, "examples": int(sums["examples"]), **metrics.figures(dict(sums))}
            for client, sums in members
        ],
        "pooled": metrics.figures(total),
    }
    if "bin_count" in total:
        detail |= {"reliability": metrics.curve(total), "retention": metrics.retention(total)}
    return detail


def _curves(found: Sequence[Evaluation]) -> Record:
    """Return, by axis, the figures at every value: mean, std, pooled, and each client's."""
    from bflcore import metrics

    curves: Record = {}
    for axis in found[0].curves if found else ():
        values = list(found[0].curves[axis])
        sums = {value: [e.curves[axis][value] for e in found] for value in values}
        over = [metrics.summarise(sums[value]) for value in values]
        each = [
            {"client": e.client}
            | _columns([metrics.figures(e.curves[axis][value]) for value in values])
            for e in found
        ]
        curves[axis] = {
            "values": values,
            **{
                kind: _columns([{name: f[kind] for name, f in at.items()} for at in over])
                for kind in ("mean", "std", "pooled")
            },
            "clients": each,
        }
    return curves


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _figures(record: Record) -> Record:
    return {
        key: value for key, value in record.items() if key not in {"seconds", "bytes", "dropped"}
    }


class RunDirectory:
    """The folder of one run; every file is complete at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, prepared: Prepared, registry: Registry) -> RunDirectory:
        """Make the folder and write what is known before the first round.

        Raises `RunError` when it exists or cannot be written.
        """
        if path.exists():
            raise RunError(f"--out: {path} exists; choose another folder or remove it")
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise RunError(
                f"--out: {path} cannot be created ({error.strerror}); choose a writable folder"
            ) from None
        directory = cls(path)
        directory.write_text("experiment.toml", tomli_w.dumps(prepared.experiment.as_toml()))
        directory.write_json("environment.json", _environment(registry))
        prepared.partition.save(path / "partition.npz")
        return directory

    def write_text(self, name: str, text: str) -> None:
        """Write a file aside and rename it into place."""
        aside = self.path / f".{name}.writing"
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.path / name)

    def write_json(self, name: str, value: object) -> None:
        """Write indented JSON."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def append(self, record: Record) -> None:
        """Add one line to ``metrics.jsonl`` and flush it."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def write_checkpoint(self, broadcast: Broadcast, memories: Mapping[int, Any]) -> None:
        """Write the server's state and the clients' memories as safetensors."""
        from safetensors.torch import save_file

        folder = self.path / "checkpoint"
        folder.mkdir(exist_ok=True)
        server = {
            **broadcast.start.pack("start."),
            **broadcast.prior.pack("prior."),
            **{f"hyper.{name}": tensor for name, tensor in broadcast.hyper.items()},
        }
        clients = {
            f"{client}.{name}": tensor
            for client, memory in sorted(memories.items())
            for name, tensor in memory.items()
        }
        for name, tensors in (("server", server), ("clients", clients)):
            aside = folder / f".{name}.safetensors.writing"
            save_file({k: t.contiguous().clone() for k, t in tensors.items()}, aside)
            aside.replace(folder / f"{name}.safetensors")


def default_directory(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """Return a folder that does not exist yet: ``runs/bpfed-mnist5k-0``, ``...-0-2``, ..."""
    stem = f"{experiment.method}-{Path(experiment.data.data).stem}-{experiment.run.seed}"
    return next(path for path in _numbered(root / stem) if not path.exists())


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def _environment(registry: Registry) -> Record:
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "distributions": {d.name: d.version for d in registry.distributions},
    }
