"""Export of an experiment as a Flower app, to run on servers and nodes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import tomli_w
import torch

from bfl_flower.app import DATA, EXPERIMENT, without_samples
from bflcore.data.base import Dataset
from bflcore.data.partition import split_off
from bflcore.errors import OptionError, RunError
from bflcore.experiments.environment import used_distributions
from bflcore.experiments.prepare import assemble
from bflcore.models.user import UserModel, file_name

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.experiments.prepare import Prepared
    from bflcore.experiments.resolve import Experiment
    from bflcore.problem.base import Shares
    from bflcore.registry.loading import Registry

__all__ = ["export", "form_of", "refuse"]

APP = '''"""A Flower app, written by bfl flower export; what it runs is in experiment.toml."""

from pathlib import Path

from bfl_flower.app import client_app, server_app

FOLDER = Path(__file__).parent
server = server_app(FOLDER)
client = client_app(FOLDER)
'''

# What the app's README adds to the shape of a sample.
RANGES = {"0,1": "", "-1,1": " of floats in [-1, 1]"}

README = """# {method} on Flower

On every machine: `pip install {distributions}`, the same versions everywhere.

Node number `client` is 0 to {last}. Its data file holds x, y, x_test and y_test: samples {shape},
{targets}. {held}{network}Features are raw{scaled}.{table}
What a client keeps is stored beside its data, in client-0.state. After the last round, its own
model is there, too: `bfl predict client-0.state/model.bfl new.csv --out predictions.csv`, or
`bflcore.load_model("client-0.state/model.bfl")` in Python.

## A trial on one machine

    flower-superlink --insecure --disable-runtime-dependency-installation

    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9094 \\
        --node-config 'client=0 data="/path/to/client-0.npz"'

Each node needs a --port of its own. `config.toml` in Flower's folder (~/.flwr) names the server:

    [superlink.mine]
    address = "127.0.0.1:8000"
    insecure = true

Start the run in this folder:

    flwr run . mine --stream

Every round prints a line with its loss and, where it was evaluated, the clients' mean accuracy or
error. The run directory is `{out}`, in the folder where flower-superlink was started;
`--run-config 'out="/srv/run"'` chooses another. A run that was stopped continues from its last
checkpoint when started again.

## With certificates and keys

SERVER is the server's name, as the nodes reach it.

1. Once, where the certificates are made (keep ca.key there):

{certificates}

2. Every client makes a key pair, and sends the file client-0.key.pub to the server:

       ssh-keygen -q -t ecdsa -b 384 -N "" -f client-0.key

3. The server, with ca.crt, server.crt and server.key:

       flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt \\
           --ssl-keyfile server.key --enable-supernode-auth \\
           --disable-runtime-dependency-installation --host 0.0.0.0

4. `config.toml` of whoever starts runs:

       [superlink.mine]
       address = "SERVER:8000"
       root-certificates = "/path/to/ca.crt"

   Register every client's key; other nodes are turned away:

       flwr supernode register client-0.key.pub mine

5. Every client, with ca.crt and its own key:

       flower-supernode --root-certificates ca.crt --superlink SERVER:8000 \\
           --auth-supernode-private-key client-0.key \\
           --node-config 'client=0 data="/path/to/client-0.npz"'

6. Start the run as above.

What this protects: messages are encrypted, nodes know the server, and the server admits registered
keys alone. What it does not: whoever reaches the server's port can start runs and register keys, so
keep it inside a private network; a registered node may claim any client number that no node has
claimed before, and holds it from then on; the server sees every client's update (there is no
secure aggregation); updates carry no noise for differential privacy.
"""

# From a name to a certificate of the federation's own authority.
CERTIFICATES = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 365 \\
    -subj "/CN=federation" -addext "keyUsage=critical,keyCertSign" -keyout ca.key -out ca.crt
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes \\
    -subj "/CN=SERVER" -addext "subjectAltName=DNS:SERVER" -keyout server.key -out server.csr
openssl x509 -req -days 365 -in server.csr -copy_extensions copy \\
    -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt
"""

NETWORK = "The network is in {0}, which travels with this app; what it imports must be installed.\n"
HELD = "The node holds {:.3g} of the {} in x out for {}.\n"
TABLE = """
Or the file is a table (.csv or .parquet) with the columns in `data.toml` and the target {}, of
which --test-fraction is held out for testing."""


def refuse(prepared: Prepared, form: Mapping[str, Any]) -> None:
    """Raise `OptionError` if the experiment needs pooled samples, or cannot be divided."""
    experiment = prepared.experiment
    if "pools-samples" in experiment.inference.tags:
        raise OptionError(
            f"inference {experiment.inference.name} trains on the pooled samples of all clients, "
            "but a node holds those of one client; run it with --engine local or --engine flower"
        )
    for purpose in _held(prepared):
        if experiment.label_noise:
            raise OptionError(
                f"--{purpose}-fraction: nodes hold out their {purpose} samples themselves, but "
                "--label-noise has made labels wrong by then; leave one of the two out"
            )
    if experiment.run.pretrain:
        raise OptionError(
            "--pretrain needs samples, but the server does not have any; leave it out"
        )
    if not _starts_without_samples(prepared, form):
        raise OptionError(
            f"inference {experiment.inference.name} is initialised from samples of all clients, "
            "but the server does not have any; run it with --engine local or --engine flower"
        )


def _starts_without_samples(prepared: Prepared, form: Mapping[str, Any]) -> bool:
    """Return whether the first broadcast can be computed without samples."""
    experiment = prepared.experiment
    inference = experiment.inference
    alone = assemble(experiment, *without_samples(form, experiment)).problem
    try:
        return all(
            tensor.equal(begins(prepared.problem).pack()[name])
            for begins in (inference.initial, inference.prior)
            for name, tensor in begins(alone).pack().items()
        )
    except Exception:  # noqa: BLE001 - any error shows that samples are needed
        return False


def form_of(prepared: Prepared) -> dict[str, Any]:
    """Return the content of ``data.toml``: the task, and the shape of a sample."""
    problem = prepared.problem
    one = problem.train.x[None, :1]
    return {
        "name": prepared.experiment.data.data,
        "task": problem.likelihood.task,
        "shape": list(one.shape[2:]),
        "outputs": problem.forward(problem.initial[None], one).shape[-1],
        "standardise": problem.standardise,
        **_table_of(prepared),
    }


def _table_of(prepared: Prepared) -> dict[str, Any]:
    """Return the schema of a table and the names of its classes, with which nodes read theirs."""
    described = prepared.description
    if described.schema is None:
        return {}
    return {"schema": attrs.asdict(described.schema), "classes": list(described.classes)}


def export(
    folder: Path,
    prepared: Prepared,
    registry: Registry,
    form: Mapping[str, Any],
    *,
    with_data: bool,
) -> None:
    """Write the app for samples of a `form`, and those of each client under ``nodes`` when asked.

    Raises `RunError` if the folder exists or cannot be created.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise RunError(f"{folder} exists; choose another folder or remove it") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be created ({error.strerror})") from None
    problem, experiment = prepared.problem, prepared.experiment
    data = experiment.data
    labels, outputs = form["task"] == "classification", form["outputs"]
    needed = sorted(used_distributions(experiment, registry))
    out = f"runs/{folder.name}"
    settings, model = experiment.as_toml(), experiment.model
    own, network = {}, ""
    if isinstance(model, UserModel) and model.source:
        name = file_name(model.name)
        own[name], network = model.source.read_text(encoding="utf-8"), NETWORK.format(name)
        called = f"{Path(name).stem}:{model.name.rpartition(':')[2]}"
        settings["model"] = {**settings["model"], "name": called}
    texts: dict[str, Any] = {
        "bfl_app.py": APP,
        **own,
        EXPERIMENT: tomli_w.dumps(settings),
        DATA: tomli_w.dumps(form),
        "pyproject.toml": tomli_w.dumps(_project(experiment, out)),
        "README.md": README.format(
            method=experiment.method,
            distributions=" ".join(needed),
            last=data.clients - 1,
            shape=f"{form['shape']}{RANGES[data.input_range]}",
            targets=f"labels 0 to {outputs - 1}" if labels else f"{outputs} targets",
            table=TABLE.format(column) if (column := _target(prepared)) else "",
            held="".join(
                HELD.format(fraction, "remaining samples" if number else "samples", purpose)
                for number, (purpose, (fraction, _)) in enumerate(_held(prepared).items())
            ),
            network=network,
            scaled=": they are scaled by sums over all clients" if form["standardise"] else "",
            certificates=textwrap.indent(CERTIFICATES.strip(), " " * 7),
            out=out,
        ),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if with_data:
        (folder / "nodes").mkdir()
        for client in (*problem.clients, *problem.novel):
            _save(folder / "nodes" / f"client-{client}.npz", client, prepared)


def _target(prepared: Prepared) -> str:
    schema = prepared.description.schema
    return schema.target if schema else ""


def _save(path: Path, client: int, prepared: Prepared) -> None:
    test = prepared.problem.test
    arrays = dict(zip(("x", "y"), _training_samples(prepared, client), strict=True))
    if test.size(client):
        arrays |= dict(zip(("x_test", "y_test"), test.of(client), strict=True))
    plain: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
    np.savez_compressed(path, **plain)


def _held(prepared: Prepared) -> dict[str, tuple[float, Shares]]:
    """Return what nodes hold out, in this order: the fraction and the samples, by purpose."""
    data, problem = prepared.experiment.data, prepared.problem
    found = {
        "validation": (data.validation_fraction, problem.validation),
        "calibration": (data.calibration_fraction, problem.calibration),
    }
    return {name: (fraction, s) for name, (fraction, s) in found.items() if s is not None}


def _training_samples(prepared: Prepared, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's samples with those that are held out where the node will find them."""
    problem, seed = prepared.problem, prepared.experiment.run.seed
    x, y = problem.train.of(client)
    for purpose, (fraction, samples) in reversed(_held(prepared).items()):
        pooled = [torch.cat(both) for both in zip((x, y), samples.of(client), strict=True)]
        # `divide` groups a client's training samples by class; so were these before the split.
        before = pooled[1] if problem.likelihood.task == "regression" else pooled[1].sort()[0]
        dataset = Dataset("node", problem.likelihood.task, pooled[0].numpy(), before.numpy())
        rows = split_off(dataset, np.arange(len(before)), fraction, seed, client, purpose)
        order = np.argsort(np.concatenate(rows))
        x, y = pooled[0][order], pooled[1][order]
    return x, y


def _project(experiment: Experiment, out: str) -> dict[str, Any]:
    return {
        "project": {
            "name": f"bfl-{experiment.method}-app",
            "version": "1.0.0",
            "description": f"{experiment.method}, run by bflcore",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "bflcore",
                    "components": {"serverapp": "bfl_app:server", "clientapp": "bfl_app:client"},
                    # nodes: number of nodes to wait for (0: all clients); wait: seconds.
                    "config": {"out": out, "nodes": 0, "wait": 300.0},
                }
            }
        },
    }
