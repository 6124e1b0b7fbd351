"""Exported apps: what is written, and a real server with three nodes on the loopback address."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import bflcore
from bfl_flower.app import prepare_node
from bflcore.errors import DataError
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import read, resolve
from bflcore.registry.loading import load_registry

BIN = Path(sys.executable).parent
TINY = (
    *("--data", "synthetic", "--partition", "natural", "--clients", "3", "--seed", "3"),
    *("-o", "dataset.owners=3", "-o", "dataset.samples=30", "-o", "inference.local_epochs=1"),
)


def experiment_of(folder):
    file = read(folder / "experiment.toml")
    return resolve(load_registry(), file["method"], file, {})


def test_an_app_holds_what_servers_and_nodes_need(bfl, tmp_path):
    status, out, err = bfl("flower", "export", "app", "bpfed", *TINY)
    assert (status, err) == (0, "")
    assert "app/README.md" in out
    app = tmp_path / "app"
    project = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["components"] == {"serverapp": "bfl_app:server", "clientapp": "bfl_app:client"}
    assert project["config"]["out"] == "runs/app"
    for path in app.rglob("*.*"):  # nothing of the machine on which it was written
        assert str(tmp_path).encode() not in path.read_bytes(), path
    assert "pip install bfl-bpfed bfl-flower bflcore" in (app / "README.md").read_text()
    assert experiment_of(app).engine.name == "flower"
    assert sorted(path.name for path in (app / "nodes").iterdir()) == [
        f"client-{client}.npz" for client in range(3)
    ]


NETS = """
from torch import nn

def build(input_shape, outputs):
    return nn.Linear(*input_shape, outputs)
"""


def test_a_network_of_ones_own_travels_with_the_app_and_is_named_in_its_readme(
    bfl, tmp_path, monkeypatch
):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "flowernets.py").write_text(NETS)
    status, _, err = bfl(
        "flower", "export", "app", "fedavg", *TINY, "--model", "nets/flowernets.py:build"
    )
    assert status == 0, err
    app = tmp_path / "app"
    assert (app / "flowernets.py").read_text() == NETS
    assert "The network is in flowernets.py, which travels with" in (app / "README.md").read_text()
    assert read(app / "experiment.toml")["model"]["name"] == "flowernets:build"
    # On another machine, where the module was never installed:
    for path in [path for path in sys.path if path.endswith("nets")]:
        sys.path.remove(path)
    monkeypatch.delitem(sys.modules, "flowernets")
    monkeypatch.chdir("/")
    code = (
        "import sys; from pathlib import Path; from bfl_flower.app import _experiment; "
        "print(_experiment(Path(sys.argv[1]), '').model.network((60,), 10))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(app)], capture_output=True, text=True, check=False
    )
    assert "Linear(in_features=60" in found.stdout, found.stderr


def test_a_node_sees_its_own_samples_and_the_network_of_all(bfl, tmp_path):
    assert bfl("flower", "export", "app", "fedavg", *TINY)[0] == 0
    app = tmp_path / "app"
    experiment = experiment_of(app)
    whole = prepare(experiment).problem
    own = prepare_node(app, experiment, 1, app / "nodes" / "client-1.npz").problem
    assert torch.equal(own.initial, whole.initial)
    for mine, theirs in ((own.train, whole.train), (own.test, whole.test)):
        assert [mine.size(client) for client in range(3)] == [0, theirs.size(1), 0]
        assert all(map(torch.equal, mine.of(1), theirs.of(1)))


def patients(path, owners=("lmu", "ukb", "ukm"), rows=90):
    """Write a table with words and missing values."""
    rng = np.random.default_rng(0)
    lines = ["age,ward,hospital,outcome"]
    for row in range(rows):
        age = "" if rng.random() < 0.2 else f"{rng.normal(60, 15):.1f}"
        ward, outcome = rng.choice(["er", "icu"]), rng.choice(["mild", "severe"])
        lines.append(f"{age},{ward},{owners[row % len(owners)]},{outcome}")
    path.write_text("\n".join(lines) + "\n")
    return lines


def test_nodes_of_a_table_have_its_schema_and_read_tables_of_their_own(bfl, tmp_path):
    lines = patients(tmp_path / "patients.csv")
    table = ("--data", "patients.csv", "--target", "outcome", "--client", "hospital")
    status, _, err = bfl("flower", "export", "app", "fedavg", *table)
    assert status == 0, err
    app = tmp_path / "app"
    experiment = experiment_of(app)
    whole = prepare(experiment).problem
    exported = prepare_node(app, experiment, 1, app / "nodes" / "client-1.npz").problem
    assert torch.equal(exported.initial, whole.initial)
    for name, sums in whole.moments(1).items():
        assert torch.equal(exported.moments(1)[name], sums)
    # The node's own table: its columns in another order, and one more.
    mine = [line.split(",") for line in lines if ",ukb," in line]
    rows = [f"{outcome},{ward},x,{age}" for age, ward, _, outcome in mine]
    (tmp_path / "ukb.csv").write_text("\n".join(["outcome,ward,zip,age", *rows]) + "\n")
    own = prepare_node(app, experiment, 1, tmp_path / "ukb.csv").problem
    assert (own.train.size(1), own.test.size(1)) == (24, 6)
    together = [torch.cat([part.of(1)[0] for part in (of.train, of.test)]) for of in (own, whole)]
    ours, theirs = (sorted(map(str, x.tolist())) for x in together)
    assert ours == theirs
    (tmp_path / "ukb.csv").write_text("age,ward,outcome\n1,er,dead\n")
    with pytest.raises(DataError, match="column outcome has 'dead'; allowed: mild, severe"):
        prepare_node(app, experiment, 1, tmp_path / "ukb.csv")


def test_a_node_of_arrays_does_not_read_tables(bfl, tmp_path):
    assert bfl("flower", "export", "app", "fedavg", *TINY)[0] == 0
    patients(tmp_path / "ukb.csv")
    app = tmp_path / "app"
    with pytest.raises(DataError, match="was not exported from a table; give an .npz file"):
        prepare_node(app, experiment_of(app), 1, tmp_path / "ukb.csv")


def test_nodes_hold_samples_in_the_input_range(bfl, tmp_path):
    flags = ("--data", "digits", "--clients", "3", "--input-range", "-1,1")
    status, _, err = bfl("flower", "export", "app", "fedavg", *flags)
    assert status == 0, err
    app = tmp_path / "app"
    experiment = experiment_of(app)
    whole = prepare(experiment).problem
    own = prepare_node(app, experiment, 1, app / "nodes" / "client-1.npz").problem
    assert float(own.train.x.min()) == -1
    for mine, theirs in ((own.train, whole.train), (own.test, whole.test)):
        assert all(map(torch.equal, mine.of(1), theirs.of(1)))
    assert "samples [1, 8, 8] of floats in [-1, 1]" in (app / "README.md").read_text()


def test_data_of_another_form_is_refused(bfl, tmp_path):
    assert bfl("flower", "export", "app", "fedavg", *TINY, "--without-data")[0] == 0
    app = tmp_path / "app"
    assert not (app / "nodes").exists()
    np.savez(tmp_path / "mine.npz", x=np.zeros((5, 2), np.float32), y=np.arange(5) % 2)
    with pytest.raises(DataError, match=r"mine.npz: classification with samples \[2\] and"):
        prepare_node(app, experiment_of(app), 0, tmp_path / "mine.npz")
    x = np.zeros((5, *tomllib.loads((app / "data.toml").read_text())["shape"]), np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=np.full(5, 99))
    with pytest.raises(DataError, match="y has label 99; allowed: 0 to"):
        prepare_node(app, experiment_of(app), 0, tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("app", "bpfd"), "did you mean bpfed?"),
        (("app", "bpfed", "--pretrain", "0.1"), "--pretrain needs samples, but the server"),
        (("app", "centralised"), "inference pooled trains on the pooled samples of all"),
        (("taken", "bpfed"), "taken exists; choose another folder"),
        (("app",), "Missing argument 'METHOD'"),
        (("app", "bpfed", "--clients", "0"), "--clients"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(bfl, tmp_path, arguments, reason):
    (tmp_path / "taken").mkdir()
    flags = TINY[:4] + TINY[6:] if "--clients" in arguments else TINY
    status, _, err = bfl("flower", "export", *arguments, *flags)
    assert status == 2
    assert reason in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


SHAPE = ("--shape", "6", "--outputs", "3", "--clients", "3")


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_app_is_written_from_a_shape_and_runs_on_nodes_with_data(bfl, tmp_path, task):
    flags = ("--rounds", "2", "--seed", "3", "--task", task, "--standardise")
    assert bfl("flower", "export", "app", "fedper", *SHAPE, *flags)[0] == 0
    app = tmp_path / "app"
    assert not (app / "nodes").exists()
    assert tomllib.loads((app / "data.toml").read_text()) == {
        "name": "samples",
        "task": task,
        "shape": [6],
        "outputs": 3,
        "standardise": True,
    }
    text = (app / "README.md").read_text()
    targets = "labels 0 to 2" if task == "classification" else "3 targets"
    assert f"samples [6],\n{targets}." in text
    assert "Features are raw: they are scaled by sums over all clients." in text
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 6)).astype(np.float32)
    y = np.arange(9) % 3 if task == "classification" else x[:, :3]
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    own = prepare_node(app, experiment_of(app), 1, tmp_path / "mine.npz").problem
    assert [own.train.size(client) for client in range(3)] == [0, 9, 0]
    assert own.standardise


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shape", "6"), "--outputs: is missing; with --shape, give at least 2"),
        (("--shape", "6", "--outputs", "1"), "--outputs: 1 is not allowed; with --shape, give"),
        (("--shape", "6,x", "--outputs", "3"), "--shape: '6,x' is not allowed; allowed: numbers"),
        (("--outputs", "3"), "--outputs and --standardise need --shape"),
        ((*SHAPE, "--data", "digits"), "--data: has no effect with --shape"),
        ((*SHAPE, "--partition", "iid"), "--partition: has no effect with --shape"),
        ((*SHAPE, "--pretrain", "0.1"), "--pretrain needs samples"),
    ],
)
def test_mistakes_with_a_shape_are_one_line_and_nothing_is_written(bfl, tmp_path, flags, message):
    status, _, error = bfl("flower", "export", "app", "fedavg", *flags)
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert list(tmp_path.iterdir()) == []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(log, *command, environment):
    """Run a program and everything that it starts; end all of it."""
    with log.open("w") as file:
        started = subprocess.Popen(
            [str(word) for word in command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        end(started)


def end(started):
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def wait_until(happened, seconds, logs):
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            found = "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs)
            pytest.fail(f"nothing came within {seconds} s\n{found}")
        time.sleep(0.2)


def records(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["bpfed", "em-tdamp"])
def test_a_server_and_three_nodes_one_killed_give_the_local_numbers(bfl, tmp_path, method):
    raw = ("-o", "dataset.standardise=true")
    flags = (*TINY, *raw, "--rounds", "4", "--eval-every", "1", "--client-timeout", "60")
    assert bfl("run", method, *flags[:-2], "--out", "local", "--quiet")[0] == 0
    assert bfl("flower", "export", "app", method, *flags)[0] == 0
    app, run = tmp_path / "app", tmp_path / "runs" / "app"
    address = f"127.0.0.1:{free_port()}"
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "{address}"\ninsecure = true\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    logs = [tmp_path / f"{name}.log" for name in ("server", "run", "node-0", "node-1", "node-2")]
    with ExitStack() as running:

        def start(log, *command):
            return running.enter_context(process(log, *command, environment=environment))

        host, port = address.split(":")
        quiet = ("--insecure", "--disable-runtime-dependency-installation")
        start(logs[0], BIN / "flower-superlink", *quiet, "--host", host, "--port", port)
        wait_until(lambda: "startup complete" in logs[0].read_text(), 60, logs[:1])
        nodes = [
            start(
                logs[2 + client],
                BIN / "flower-supernode",
                *("--insecure", "--superlink", address, "--port", free_port()),
                "--node-config",
                f'client={client} data="{app / "nodes" / f"client-{client}.npz"}"',
            )
            for client in range(3)
        ]
        start(logs[1], BIN / "flwr", "run", app, "mine", "--stream")
        wait_until(lambda: len(records(run)) >= 2, 400, logs)
        end(nodes[2])
        wait_until((run / "report.html").exists, 600, logs)
    expected, found = records(tmp_path / "local"), records(run)
    assert found[:2] == expected[:2]
    last = json.loads((run / "summary.json").read_text())
    assert last["rounds"] == 4
    assert {entry["client"] for entry in last["dropped"]} == {2}
    held = list((app / "nodes").glob("client-0.state/*/*.safetensors"))
    assert 1 <= len(held) <= 2  # the personal state stays on the node


@pytest.mark.parametrize("data", [(), ("-o", "dataset.classes=0")], ids=["classes", "regression"])
def test_a_node_holds_the_same_samples_out_for_validation_and_calibration(bfl, tmp_path, data):
    flags = (*TINY, *data, "--validation-fraction", "0.3", "--calibration-fraction", "0.4")
    assert bfl("flower", "export", "app", "fedavg", *flags)[0] == 0
    app = tmp_path / "app"
    assert (
        "The node holds 0.3 of the samples in x out for validation.\n"
        "The node holds 0.4 of the remaining samples in x out for calibration.\n"
        in (app / "README.md").read_text()
    )
    experiment = experiment_of(app)
    whole = prepare(experiment).problem
    for client in range(3):
        own = prepare_node(app, experiment, client, app / "nodes" / f"client-{client}.npz").problem
        assert own.validation.size(client) > 0
        assert own.calibration.size(client) > 0
        for mine, theirs in zip(own.samples.values(), whole.samples.values(), strict=True):
            assert all(map(torch.equal, mine.of(client), theirs.of(client)))


@pytest.mark.parametrize("purpose", ["validation", "calibration"])
def test_wrong_labels_cannot_be_kept_out_of_a_nodes_held_out_samples(bfl, tmp_path, purpose):
    flags = (*TINY, f"--{purpose}-fraction", "0.3", "--label-noise", "pair:0.1")
    status, _, err = bfl("flower", "export", "app", "fedavg", *flags)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: --{purpose}-fraction: ")
    assert "leave one of the two out" in err
    assert not (tmp_path / "app").exists()


def indented(text, first):
    """Return the commands of the README's block that begins with `first`, as they stand there."""
    block = next(b for b in text.split("\n\n") if b.strip().startswith(first))
    return textwrap.dedent(block)


@pytest.mark.thorough
def test_certificates_and_keys_as_the_readme_makes_them_admit_registered_nodes_alone(bfl, tmp_path):
    if not (shutil.which("openssl") and shutil.which("ssh-keygen")):
        pytest.skip("needs openssl and ssh-keygen")
    flags = ("--rounds", "2", "--eval-every", "1", "--clients", "2", "--local-epochs", "2")
    shape = ("--shape", "4", "--outputs", "2", "-o", "model.hidden=5", "--model", "mlp")
    assert bfl("flower", "export", "app", "fedper", *shape, *flags)[0] == 0
    app, readme = tmp_path / "app", (tmp_path / "app" / "README.md").read_text()
    rng = np.random.default_rng(0)
    for client in range(2):
        x = rng.normal(size=(40, 4)).astype(np.float32)
        y = (x[:, 0] > 0).astype(int)
        test = {"x_test": x[30:], "y_test": y[30:]}
        np.savez(tmp_path / f"client-{client}.npz", x=x[:30], y=y[:30], **test)
    address = f"localhost:{free_port()}"
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "{address}"\n'
        f'root-certificates = "{tmp_path / "ca.crt"}"\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }

    def shell(text, **names):
        for old, new in names.items():
            text = text.replace(old.replace("_", "-"), new)
        done = subprocess.run(
            ["/bin/sh", "-ec", text], check=False, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr

    shell(indented(readme, "openssl req").replace("SERVER", "localhost"))
    for key in ("client-0", "client-1", "stranger"):
        shell(indented(readme, "ssh-keygen"), client_0=key)
    logs = [tmp_path / f"{name}.log" for name in ("server", "run", "stranger", "node-0", "node-1")]
    with ExitStack() as running:

        def start(log, text):
            command = ("/bin/sh", "-ec", "exec " + text.strip())
            return running.enter_context(process(log, *command, environment=environment))

        def node(log, key, client):
            text = indented(readme, "flower-supernode --root").replace("SERVER:8000", address)
            text = text.replace("client-0.key", f"{key}.key").replace(
                "client=0", f"client={client}"
            )
            text = text.replace("/path/to/client-0", str(tmp_path / f"client-{client}"))
            return start(log, f"{text.rstrip()} --port {free_port()}")

        host, port = address.split(":")
        text = indented(readme, "flower-superlink --ssl").replace("0.0.0.0", host)
        start(logs[0], f"{text.rstrip()} --port {port}")
        wait_until(lambda: "startup complete" in logs[0].read_text(), 60, logs[:1])
        stranger = node(logs[2], "stranger", 1)
        wait_until(lambda: stranger.poll() is not None, 120, logs[2:3])
        for client in range(2):
            shell(indented(readme, "flwr supernode register"), client_0=f"client-{client}")
            node(logs[3 + client], f"client-{client}", client)
        start(logs[1], f"flwr run {app} mine --stream")
        run = tmp_path / "runs" / "app"
        wait_until((run / "report.html").exists, 500, logs)
        wait_until(lambda: "run directory" in logs[1].read_text(), 60, logs)
    admitted = ["SuperNode ID" in log.read_text() for log in logs[2:]]
    assert admitted == [False, True, True], logs[2].read_text()
    stream = logs[1].read_text()
    assert re.search(r"round 1  loss \S+  personal.accuracy 0\.\d{4}", stream)
    found = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"personal.accuracy {found['personal.accuracy']['mean']:.4f}" in stream
    evaluated = json.loads((run / "evaluation.json").read_text())["personal"]["clients"]
    for client, entry in enumerate(evaluated):
        assert bfl(
            *("predict", f"client-{client}.state/model.bfl", f"client-{client}.npz"),
            *("--out", "p.csv"),
        )[0] == 0  # fmt: skip
        model = bflcore.load_model(tmp_path / f"client-{client}.state" / "model.bfl")
        with np.load(tmp_path / f"client-{client}.npz") as file:
            hits = model.predict(file["x_test"]).labels.numpy() == file["y_test"]
        assert hits.mean() == entry["accuracy"]
