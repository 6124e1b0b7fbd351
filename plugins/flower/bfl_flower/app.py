"""The two halves of an exported Flower app: a server without data, and one node per client.

The folder of the app contains ``experiment.toml``, as `bfl run` writes it, and ``data.toml``, which
describes a sample. Both halves build the same network from these files.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from bfl_flower.node import MemoryStore, Node, failure
from bfl_flower.session import GridSession
from bfl_flower.wire import ACTIONS
from bflcore.api.model import ClientModel
from bflcore.api.rebuild import settings_of
from bflcore.api.runs import round_line
from bflcore.data.base import Dataset
from bflcore.data.partition import Partition, hold_back
from bflcore.data.schema import Schema
from bflcore.data.split import split
from bflcore.data.user import load_npz, load_rows
from bflcore.engines.client import ClientWorker
from bflcore.errors import BflError, DataError, OptionError, RunError, RunWarning
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import Prepared, assemble
from bflcore.experiments.resolve import Experiment, read, resolve
from bflcore.experiments.run import execute
from bflcore.messages import Broadcast, Personalised
from bflcore.randomness import SERVER, numpy_stream
from bflcore.registry.loading import load_registry

__all__ = [
    "DATA",
    "EXPERIMENT",
    "build_node",
    "client_app",
    "prepare_node",
    "server_app",
    "without_samples",
]

EXPERIMENT, DATA = "experiment.toml", "data.toml"
NODES = "nodes.json"  # which node holds which client, in the run directory
MODEL = "model.bfl"  # what the last round leaves in a node's state folder


def server_app(folder: Path) -> ServerApp:
    """Return the server, which runs the experiment on the connected nodes."""
    app = ServerApp()
    app.main()(partial(_serve, folder))
    return app


def client_app(folder: Path) -> ClientApp:
    """Return the node, which uses the data and the memory named in its configuration.

    Keys of the configuration: ``client`` (its number), ``data`` (an .npz file with x, y, x_test and
    y_test), ``state`` (folder of memories; default: next to the data), ``device``.
    """
    app = ClientApp()
    answer = partial(_answer, folder)
    for register in (app.train(), app.evaluate(), *map(app.query, ACTIONS)):
        register(answer)
    return app


def _serve(folder: Path, grid: Grid, context: Context) -> None:
    """Run the experiment; if its run directory exists, continue from the last checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RunWarning)
        warnings.showwarning = lambda message, *_, **__: click.echo(f"warning: {message}")
        _run(folder, grid, context)


def _run(folder: Path, grid: Grid, context: Context) -> None:
    from bflcore.report import write_report

    settings = context.run_config
    experiment, registry = _experiment(folder, "cpu"), load_registry()
    prepared = assemble(experiment, *without_samples(read(folder / DATA), experiment))
    problem, inference = prepared.problem, prepared.experiment.inference
    out = Path(str(settings["out"]))
    if (out / EXPERIMENT).exists():
        directory = RunDirectory.open(out)
        if changes := directory.changes(prepared, registry):
            raise RunError(f"cannot resume {out} unchanged: {'; '.join(changes)}; restore it")
    else:
        directory = RunDirectory.create(out, prepared, registry)
    everyone = (*problem.clients, *problem.novel)
    timeout = getattr(experiment.engine, "client_timeout", 0.0)
    family = type(inference.initial(problem))
    session = GridSession(grid, family, everyone, timeout, out / NODES)
    connected = session.wait_for(int(settings["nodes"]) or len(everyone), float(settings["wait"]))
    click.echo(
        f"clients connected: {', '.join(map(str, connected))}; {experiment.run.rounds} rounds"
    )

    def progress(number: int, loss: float, record: dict[str, Any] | None) -> None:
        failed = [str(entry["client"]) for entry in record["dropped"]] if record else []
        dropped = f"  dropped: {', '.join(failed)}" if failed else ""
        click.echo(round_line(number, loss, record) + dropped)

    execute(prepared, directory, progress, session)
    click.echo(f"run directory: {out}\nreport: {write_report([out])}")


def _answer(folder: Path, message: Message, context: Context) -> Message:
    config = context.node_config
    for key in ("client", "data"):
        if key not in config:
            raise OptionError(
                f"--node-config: {key} is missing; give client=0 data='\"client-0.npz\"'"
            )
    data = Path(str(config["data"]))
    state = Path(str(config.get("state", data.with_suffix(".state"))))
    try:
        node = build_node(folder, int(config["client"]), data, state, str(config.get("device", "")))
    except BflError as error:
        return Message(failure(str(error), (data, state, folder)), reply_to=message)
    return node.answer(message)


@lru_cache(maxsize=1)
def build_node(folder: Path, client: int, data: Path, state: Path, device: str = "") -> Node:
    """Return the node of a client; its data are loaded once per process."""
    experiment = _experiment(folder, device)
    prepared = prepare_node(folder, experiment, client, data)
    problem = prepared.problem
    # Each experiment has its own store, deep enough for the server's last checkpoint.
    own = hashlib.sha256((folder / EXPERIMENT).read_bytes()).hexdigest()[:12]
    store = MemoryStore(state / own, experiment.run.checkpoint_every + 1)
    settings = settings_of(prepared.experiment.as_toml(), folder / EXPERIMENT)

    def keep(broadcast: Broadcast, own: Personalised) -> None:
        """Write the client's model, to be read by ``bflcore.load_model``."""
        ClientModel(
            client,
            client,
            problem.surveyed(broadcast.survey),
            experiment.inference,
            broadcast,
            own.memory or {},
            prepared.description,
            settings,
            problem.train.size(client),
            client in problem.novel,
            own.calibration,
        ).save(state / MODEL)

    worker = ClientWorker(problem, experiment.inference, experiment.run.bins)
    return Node(client, worker, store, keep, (data, store.folder, state, folder))


def prepare_node(folder: Path, experiment: Experiment, client: int, data: Path) -> Prepared:
    """Return the experiment on a node, which has the samples of `client` only.

    Raises `DataError` if the file does not match ``data.toml``.
    """
    form = read(folder / DATA)
    total = experiment.data.clients
    if not 0 <= client < total:
        raise OptionError(
            f"--node-config: client={client} is not allowed; allowed: 0 to {total - 1}"
        )
    dataset = _load(form, data)
    found = (dataset.task, list(dataset.x.shape[1:]), dataset.outputs)
    if found != (form["task"], form["shape"], form["outputs"]):
        raise DataError(
            f"{data}: {found[0]} with samples {found[1]} and {found[2]} outputs; the experiment "
            f"is a {form['task']} with samples {form['shape']} and {form['outputs']} outputs"
        )
    dataset = attrs.evolve(dataset, standardise=form["standardise"], schema=_schema(form))
    tests = 0 if dataset.x_test is None else len(dataset.x_test)
    own = {"train": np.arange(len(dataset.x)), "test": np.arange(tests)}
    if data.suffix != ".npz":
        stream = numpy_stream(experiment.run.seed, SERVER, client, "test split")
        fraction = experiment.data.test_fraction
        own = dict(zip(own, split(dataset, own["train"], stream, fraction=fraction), strict=True))
    empty = np.empty(0, np.int64)
    indices = {
        kind: tuple(index if k == client else empty for k in range(total))
        for kind, index in own.items()
    }
    partition = Partition(**indices, held_out=tests > 0)
    partition = hold_back(
        dataset,
        partition,
        experiment.run.seed,
        validation=experiment.data.validation_fraction,
        calibration=experiment.data.calibration_fraction,
    )
    return assemble(experiment, dataset, partition)


def _load(form: Mapping[str, Any], path: Path) -> Dataset:
    """Load the samples of a node: arrays, or a table if those of the experiment are one."""
    schema, task = _schema(form), str(form["task"])
    if schema is not None and schema.target and path.suffix != ".npz":
        dataset = load_rows(path, schema, task, tuple(form["classes"]))
        for note in dataset.notes:
            click.echo(f"note: {note}", err=True)
        return dataset
    if path.suffix != ".npz":
        raise DataError(
            f"{path} cannot be read: the experiment was not exported from a table; give an .npz "
            "file with x and y"
        )
    classes = int(form["outputs"]) if task == "classification" else 0
    return load_npz(path, classes, task, gaps=schema is not None)


def _schema(form: Mapping[str, Any]) -> Schema | None:
    return Schema.from_json(form["schema"]) if "schema" in form else None


def without_samples(form: Mapping[str, Any], experiment: Experiment) -> tuple[Dataset, Partition]:
    """Return data of the given form without samples, for the server."""
    labels = form["task"] == "classification"
    outputs = int(form["outputs"])
    y: Any = np.empty(0, np.int64) if labels else np.empty((0, outputs), np.float32)
    x = np.empty((0, *form["shape"]), np.float32)
    dataset = Dataset(
        form["name"],
        form["task"],
        x,
        y,
        outputs if labels else 0,
        standardise=form["standardise"],
        class_names=tuple(form.get("classes", ())),
        schema=_schema(form),
    )
    nobody = (np.empty(0, np.int64),) * experiment.data.clients
    return dataset, Partition(nobody, nobody)


def _experiment(folder: Path, device: str) -> Experiment:
    """Read the experiment; `device` replaces the one in the file unless empty."""
    file = read(folder / EXPERIMENT)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # a network of the user's own travels with the app
    flags = {"device": device} if device else {}
    return resolve(load_registry(), str(file["method"]), file, flags)
