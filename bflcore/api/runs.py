"""Runs: start one from Python, or load a finished one, and use what it learnt."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.api import inputs
from bflcore.api.given import own_data
from bflcore.api.model import ClientModel
from bflcore.data.user import MEMORY
from bflcore.errors import OptionError, RunError, unknown
from bflcore.lazy import lazy
from bflcore.messages import Cohort
from bflcore.options.text import value_text
from bflcore.problem.label_prior import LABEL_COUNTS
from bflcore.randomness import SERVER

if TYPE_CHECKING:
    import torch

    from bflcore.api import flags, rebuild
    from bflcore.data.schema import Schema
    from bflcore.data.tables import Table
    from bflcore.data.user import Arrays
    from bflcore.engines import pool
    from bflcore.experiments import (
        caveats,
        coefficients,
        directory,
        environment,
        integrity,
        prepare,
        resolve,
    )
    from bflcore.experiments import description as describing
    from bflcore.experiments import resume as resuming
    from bflcore.experiments import run as running
    from bflcore.experiments.checkpoint import Checkpoint
    from bflcore.experiments.coefficients import Coefficient
    from bflcore.experiments.models import Models
    from bflcore.experiments.records import Record
    from bflcore.experiments.resolve import Experiment
    from bflcore.experiments.run import Progress
    from bflcore.inference.base import LocalInference
    from bflcore.problem import Problem
    from bflcore.registry import loading
    from bflcore.registry.loading import Registry
else:
    torch = lazy("torch")
    pool = lazy("bflcore.engines.pool")
    caveats = lazy("bflcore.experiments.caveats")
    coefficients = lazy("bflcore.experiments.coefficients")
    describing = lazy("bflcore.experiments.description")
    directory = lazy("bflcore.experiments.directory")
    flags = lazy("bflcore.api.flags")
    environment = lazy("bflcore.experiments.environment")
    integrity = lazy("bflcore.experiments.integrity")
    prepare = lazy("bflcore.experiments.prepare")
    rebuild = lazy("bflcore.api.rebuild")
    resolve = lazy("bflcore.experiments.resolve")
    resuming = lazy("bflcore.experiments.resume")
    running = lazy("bflcore.experiments.run")
    loading = lazy("bflcore.registry.loading")

__all__ = ["Run", "load", "resolve_call", "resume", "round_line", "run"]


class Run:
    """A finished run. Its data are not needed; the models are read when they are first used."""

    def __init__(self, path: Path, device: str = "") -> None:
        self.path = path
        self._folder = directory.RunDirectory.open(path)
        self._device = device
        self._description = describing.Description.read(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def summary(self) -> Record:
        """The content of ``summary.json``: final metrics, seconds, bytes."""
        path = self.path / "summary.json"
        try:
            return integrity.read_json(path)
        except FileNotFoundError:
            raise RunError(
                f"{self.path} is not finished; continue with: bfl resume {self.path}"
            ) from None

    @property
    def history(self) -> list[Record]:
        """The evaluated rounds: the lines of ``metrics.jsonl``."""
        path = self._folder.metrics
        try:
            return integrity.read_lines(path)
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error})") from None

    def history_frame(self) -> Any:
        """Return the history as a pandas data frame; metrics have the columns ``mean``, ...

        Raises `RunError` without pandas.
        """
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise RunError("history_frame needs pandas: pip install pandas") from None
        return pd.json_normalize(self.history)

    @property
    def clients(self) -> list[int | str]:
        """The owners' ids, or the clients' numbers where the data have no owners."""
        return [client.id for client in self._description.clients]

    @property
    def schema(self) -> Schema | None:
        """The columns of the table that the run was trained on; None if it was not a table."""
        return self._description.schema

    def coefficients(self, level: float = 0.95) -> list[Coefficient]:
        """Return a linear predictor's coefficients with credible intervals of a `level`.

        In the units of the data: the change of the linear predictor (log-odds, log rate, target)
        per unit of a column, or of a category against the first one. Raises `RunError` for a run of
        another model, `OptionError` unless 0 < `level` < 1.
        """
        self._check_finished()
        return coefficients.read_coefficients(self.path, level)

    @property
    def server(self) -> ClientModel:
        """The server's model. Raises `RunError` if clients keep a part of it to themselves."""
        problem, inference = self._problem, self._inference
        if problem.layout.personal_total:
            raise RunError(
                f"{self.path}: the server's model is not complete, clients keep a part of it; "
                "use the model of a client"
            )
        return self._model("server", SERVER, inference.initial_memory(problem))

    def client(self, id: int | str) -> ClientModel:
        """Return the model of an owner (see `clients`).

        Raises `OptionError` for an unknown one, and `RunError` if its model is not here.
        """
        numbers = {str(client): number for number, client in enumerate(self.clients)}
        if str(id) not in numbers:
            raise unknown("client", str(id), numbers)
        number = numbers[str(id)]
        model = self._model(self.clients[number], number, self._memory(number))
        own = self._models.read_calibration(number, self._problem.device)
        return attrs.evolve(model, calibration=own)

    def adapt(self, x: Any, y: Any) -> ClientModel:
        """Return a model for a client that the run never saw, given its samples.

        `x` ``[N, ...]`` raw samples, `y` ``[N]`` class labels or names, or ``[N, T]`` real targets.
        The method adapts as it does for clients held out of training (``--novel-clients``).
        """
        self._check_finished()
        number = len(self.clients)
        one = self._model("new", number, self._inference.initial_memory(self._problem))
        features = one._inputs(x)  # noqa: SLF001 - the model scales for its run
        count, problem = len(features), self._problem
        targets = inputs.targets(y, self._description, count).to(problem.device)
        if targets.is_floating_point():
            targets = targets.to(problem.initial.dtype)
            scaling = problem.train.scaling
            targets = scaling(features, targets)[1] if scaling else targets
        memory = {name: tensor[None] for name, tensor in one.memory.items()}
        saved = self._saved.broadcast
        x, y = features[None], targets[None]
        cohort = Cohort((number,), x, y, (count,), memory, problem.seed, saved.round, novel=True)
        with pool.single_threaded():
            own = self._inference.personalise(problem.for_client(cohort), saved, cohort)
        kept = {name: tensor[0].detach() for name, tensor in own.items()}
        if problem.likelihood.counts_labels:
            kept[LABEL_COUNTS] = problem.label_counts(cohort)[0]
        return attrs.evolve(one, memory=kept, size=count, novel=True)

    def _model(self, id: int | str, number: int, memory: Mapping[str, torch.Tensor]) -> ClientModel:
        clients = self._description.clients
        known = 0 <= number < len(clients)
        return ClientModel(
            id,
            number,
            self._problem,
            self._inference,
            self._saved.broadcast,
            memory,
            self._description,
            self._settings,
            clients[number].train if known else 0,
            number in self._problem.novel,
        )

    def _memory(self, number: int) -> Mapping[str, torch.Tensor]:
        state = self._index.get(number)
        if state is None:
            raise RunError(
                f"{self.path}: the model of client {self.clients[number]} is not here: it is "
                "on the machine that trained it; the server's, where complete: --client server"
            )
        if state not in {"own", "stored"}:
            raise RunError(f"{self.path}: there is no model: {state}")
        if state == "own":
            return self._models.read(number, self._problem.device)
        initial = self._inference.initial_memory(self._problem)
        return self._saved.memories.get(number, initial)

    def _check_finished(self) -> None:
        if not (self.path / "summary.json").is_file():
            _ = self.summary

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What predictions need of ``experiment.toml``."""
        path = self.path / "experiment.toml"
        values = resolve.read(path)
        environment.check_settings(self.path, values)
        return rebuild.settings_of(values, path)

    @cached_property
    def _rebuilt(self) -> tuple[Problem, LocalInference, Checkpoint]:
        self._check_finished()
        registry = loading.load_registry()
        problem, inference = rebuild.rebuild(
            registry, self._settings, self._description, self._device, self._folder.sources
        )
        checkpoints = self._folder.checkpoints
        saved = checkpoints.read(type(inference.initial(problem)), problem.device)
        if saved is None:
            raise RunError(f"{checkpoints.folder} has no checkpoint; start the run again")
        return problem.surveyed(saved.broadcast.survey), inference, saved

    @property
    def _problem(self) -> Problem:
        return self._rebuilt[0]

    @property
    def _inference(self) -> LocalInference:
        return self._rebuilt[1]

    @property
    def _saved(self) -> Checkpoint:
        return self._rebuilt[2]

    @property
    def _models(self) -> Models:
        return self._folder.models

    @cached_property
    def _index(self) -> dict[int, str]:
        return self._models.index(self._saved.broadcast.round)


def load(path: Path | str, device: str = "") -> Run:
    """Return the run in a folder that ``bfl run`` or `run` wrote; its data are not needed.

    `device`: that of the run, unless given. Raises `RunError` for another folder.
    """
    return Run(Path(path), device)


def run(
    method: str,
    *,
    out: Path | str | None = None,
    progress: bool | Progress = False,
    options: Mapping[str, object] | None = None,
    **flags_given: Any,
) -> Run:
    """Run a method, or a file ``experiment.toml``, and return the finished run.

    Other arguments are the flags of ``bfl run``, with underscores: ``data="digits", rounds=20,
    local_epochs=3``. `data` may also be what Python holds: a data frame or a dict of columns
    (``target="outcome", client="hospital"``), a dict or a tuple of arrays x, y and client, samples
    ``[N, ...]`` with arrays as `target` and `client`, a torch or a Hugging Face data set. They are
    not kept: to continue such a run, see `resume`. `options` are those of ``-o``:
    ``{"inference.kl_weight": 0.3}``. `out` is the run directory (default: a new folder under
    runs/). `progress` prints a line per round, or is called with its number, its loss and its
    record. What ``bfl run`` warns of is a warning here.
    Raises `BflError` for a mistake, as the command line does.
    """
    registry = loading.load_registry()
    experiment, own = resolve_call(registry, method, flags_given, options or {})
    prepared = prepare.prepare(experiment, own)
    path = Path(out) if out else directory.default_directory(experiment)
    folder = directory.RunDirectory.create(path, prepared, registry)
    for text in caveats.caveats(prepared):
        warnings.warn(text, stacklevel=2)
    if progress is True:
        sys.stdout.writelines(f"{note}\n" for note in prepared.notes)
    running.execute(prepared, folder, _reporter(progress))
    return Run(path, experiment.run.device)


def resume(
    path: Path | str,
    data: Any = None,
    *,
    target: Any = None,
    client: Any = None,
    progress: bool | Progress = False,
) -> Run:
    """Continue a run exactly where it stopped, and return it finished.

    A run does not keep data that Python held: give the same `data`, and `target` and `client` where
    they were arrays. Raises `RunError` if anything that its results depend on has changed.
    """
    registry, path = loading.load_registry(), Path(path)
    if isinstance(data, str | Path):
        raise OptionError(f"data: {path} knows its file or data set; leave data out")
    own, _ = _own({"data": data, "target": target, "client": client})
    prepared, folder, changes = resuming.reopen(path, registry, own)
    if changes:
        raise RunError(f"cannot resume {path} unchanged: {'; '.join(changes)}; restore it")
    if not (path / "summary.json").exists():
        running.execute(prepared, folder, _reporter(progress))
    return Run(path, prepared.experiment.run.device)


def resolve_call(
    registry: Registry, method: str, given: Mapping[str, Any], options: Mapping[str, object]
) -> tuple[Experiment, Table | Arrays | None]:
    """Return the experiment that the arguments of `run` describe, and data that Python holds.

    Nothing is loaded or written. Raises `BflError` for a mistake.
    """
    file: dict[str, Any] = {}
    if method.endswith(".toml"):
        file = resolve.read(Path(method))
        method = resolve.method_of(file, Path(method))
    if not method:
        raise OptionError("no method is given; give its name, or a file with the key method")
    own, plain = _own(given)
    texts = [f"{name}={value_text(value)}" for name, value in options.items()]
    return flags.resolve_flags(registry, method, file, plain, texts), own


def _reporter(progress: bool | Progress) -> Progress:
    return progress if callable(progress) else (_print if progress else _ignore)


def _own(given: Mapping[str, Any]) -> tuple[Table | Arrays | None, dict[str, Any]]:
    """Take data that Python holds out of the flags; paths become text."""
    plain = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
    data = plain.get("data")
    if data is None or isinstance(data, str):
        return None, plain
    return own_data(data, plain | {"data": MEMORY})


def _ignore(number: int, loss: float, record: Record | None) -> None:
    """Report nothing."""


def round_line(number: int, loss: float, record: Record | None) -> str:
    """Return one line: the round, its loss, and the clients' mean accuracy or error."""
    line = f"round {number}  loss {loss:.4g}"
    for name in ("personal.accuracy", "personal.rmse"):
        if record and name in record:
            line += f"  {name} {record[name]['mean']:.4f}"
    return line


def _print(number: int, loss: float, record: Record | None) -> None:
    sys.stdout.write(round_line(number, loss, record) + "\n")
