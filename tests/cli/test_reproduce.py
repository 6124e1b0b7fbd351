import json
import signal
import subprocess
import sys

import pytest

from bflcore.cli import main
from bflcore.cli.execution import Ended
from bflcore.studies import plan as planning
from bflcore.studies import reproduce as module
from bflcore.studies.execution import Standing

TINY = """
title = "Tiny"
source = "nobody, Table 0"
seeds = "0"
rounds = { paper = 3, here = 1 }
flags = { clients = 3, local_epochs = 1, data = "digits" }
[settings.digits]
[recipes.fedavg]
method = "fedavg"
[metrics.accuracy]
key = "personal.accuracy"
title = "accuracy, %"
[[columns]]
name = "digits"
[[rows]]
name = "fedavg"
paper = [50.0]
"""


def call(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *map(str, words)])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")


@pytest.mark.usefixtures("tiny")
def test_a_table_is_printed_and_written(capsys, tmp_path):
    code, out, err = call(capsys, "tiny.toml", "--jobs", 1)
    assert code == 0
    assert "| fedavg | 50.00 |" in out
    assert out.endswith("page: runs/reproduce/tiny.md\n")
    begins = "1 runs in runs/reproduce/runs, 0 of them finished"
    assert err.splitlines() == [begins, "1/1  fedavg_digits_1r/seed-0  done"]
    assert (tmp_path / "runs/reproduce/tiny.md").read_text() in out
    code, out, err = call(capsys, "tiny.toml", "--json", "--out", "runs/reproduce")
    assert json.loads(out)["cells"][0]["seeds"] == [0]
    assert err == ""  # nothing was run again


def test_without_a_table_all_tables_are_listed(capsys, monkeypatch):
    monkeypatch.setattr(
        planning,
        "missing",
        lambda data, folder=None: f"{data} is not here" if data == "cifar10" else "",
    )
    code, out, _ = call(capsys)
    assert code == 0
    assert "fedsi.table1  Accuracy" in out
    step = "get it with: bfl reproduce fedsi.table1 --only cifar10-small --download"
    assert f"    48 of 72 cells can be run here\n    cifar10 is not here; {step}\n" in out
    assert "    20 of 20 cells can be run here (20 on stand-in data)\n" in out
    _, out, _ = call(capsys, "--json")
    assert {"bpfed.table1", "tdamp.figures"} <= {one["table"] for one in json.loads(out)}


def test_the_list_does_not_wait_for_torch():
    code = "import sys; from bflcore.cli import bfl; bfl(['reproduce'], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("tiny")
def test_a_run_that_fails_is_told_by_the_exit_status(capsys, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace('method = "fedavg"', 'method = "fedavg"\nflags = { lr = 1e30 }'))
    for words in ([], ["--json"]):
        code, out, err = call(capsys, "tiny.toml", "--jobs", 1, *words)
        assert code == 1
        assert err.endswith("1 run failed; the same command tries again\n")
    assert json.loads(out)["failures"]
    code, out, _ = call(capsys, "tiny.toml", "--pages")
    assert (code, "* failed: `bfl run fedavg" in out) == (0, True)  # nothing was run


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Ended(signal.SIGTERM)])
def test_an_interruption_says_how_to_continue(capsys, monkeypatch, error):
    def interrupted(*_, progress, **__):
        progress(Standing(0, 1, 0, ()))
        raise error

    monkeypatch.setattr(module, "execute", interrupted)
    code, out, err = call(capsys, "tiny.toml")
    assert (code, out) == (128 + (error.args or (signal.SIGINT,))[0], "")
    assert err.splitlines()[1:] == ["interrupted. Continue with the same command"]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["tinny"], "unknown table 'tinny'"),
        (["tiny.toml", "--only", "fedsi"], "unknown row or column in --only 'fedsi'"),
        (["tiny.toml", "--rounds", "0"], "--rounds"),
        (["tiny.toml", "--seeds", "a"], "--seeds: 'a' is not allowed"),
        (["tiny.toml", "--paper", "--rounds", "2"], "exclude each other"),
        (["none.toml"], "none.toml does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, words, error):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert error in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
