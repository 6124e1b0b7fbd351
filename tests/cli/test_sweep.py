"""``bfl sweep``: what it prints, writes, refuses and continues."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bflcore.cli.sweep import show_standing
from bflcore.experiments.integrity import read_json, write_json
from bflcore.studies.execution import Standing

QUICK = (
    *("--data", "synthetic", "--partition", "natural", "--clients", "3", "--rounds", "2"),
    *("--eval-every", "1", "--local-epochs", "1", "-o", "dataset.owners=3"),
    *("-o", "dataset.samples=20", "-o", "dataset.features=6", "-o", "model.hidden=5"),
)


def test_a_sweep_prints_its_table_and_choice_and_is_compared(bfl, tmp_path):
    words = ("fedavg", *QUICK, "--grid", "lr=0.001,0.05", "--seeds", "0,3", "--out", "s")
    more = ("--validation-fraction", "0.2", "--select", "personal.nll")
    status, out, err = bfl("sweep", *words, *more, "--jobs", "1")
    assert status == 0, err
    lines = out.splitlines()
    assert [text.split()[0] for text in lines[:3]] == ["cell", "fedavg,lr=0.001", "fedavg,lr=0.05"]
    assert lines[4].startswith("best validation.nll: fedavg,lr=")
    assert "paired over seeds, 95 %" in lines[4]
    assert lines[-1] == "written: results.json, table.md, table.csv, plot.svg"
    assert err.splitlines()[0] == "4 runs in s, 0 of them finished"
    ended = [text.split()[:3] for text in err.splitlines()[1:]]
    assert ended[0] == ["1/4", "fedavg,lr=0.001/seed-0", "done"]
    assert (len(ended), "left" in err.splitlines()[-1]) == (4, False)

    # The same command, and --resume, run nothing again.
    before = (tmp_path / "s" / "results.json").read_bytes()
    for again in ((*words, *more), ("--resume", "s")):
        status, out, err = bfl("sweep", *again)
        assert (status, err) == (0, "4 runs in s, 4 of them finished\n")
        assert (tmp_path / "s" / "results.json").read_bytes() == before
    status, out, err = bfl("sweep", "--resume", "s", "--json", "--select", "personal.nll")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert [run["seed"] for run in found["runs"]] == [0, 3, 0, 3]
    assert found["best"]["metric"] == "validation.nll"
    assert bfl("sweep", "--resume", "s", "--quiet") == (0, "", "")

    # A sweep that was continued after an upgrade says so.
    file = next((tmp_path / "s").glob("*/seed-3/environment.json"))
    known = read_json(file)
    write_json(file, known | {"torch": "1.0"})
    status, _, err = bfl("sweep", "--resume", "s", "--quiet")
    assert (status, err.count("\n")) == (0, 1)
    assert "warning: The runs were made with different versions (torch: " in err
    assert "different versions (torch" in bfl("compare", "s")[1]
    write_json(file, known)

    status, out, _ = bfl("compare", "s", "--metric", "personal.nll")
    assert status == 0
    rows = out.splitlines()
    assert rows[1].split()[:3] == ["personal.nll", "fedavg,lr=0.001", "2"]
    assert rows[1].split()[-1] == "baseline"
    assert "the unit of replication is the seed" in rows[-1]
    status, out, _ = bfl("compare", "s", "--against", "s/fedavg,lr=0.05/seed-3", "--json")
    found = json.loads(out)
    assert (found["against"], found["over"]) == ("fedavg,lr=0.05", "seeds")
    bfl("compare", "s", "--over", "clients", "--out", "t.tex")
    assert "the client, within seeds" in (tmp_path / "t.tex").read_text()
    assert bfl("compare", "s", "--format", "pdf")[0] == 2


def test_a_run_that_fails_is_named_and_the_status_says_so(bfl, tmp_path):
    words = ("fedavg", *QUICK, "--seeds", "0", "--out", "s", "--grid", "clients=3,99")
    status, out, err = bfl("sweep", *words)
    assert status == 1
    assert "failed: fedavg,clients=99/seed-0: --clients: 99" in err
    assert "2/2  " in err
    assert out.splitlines()[1].startswith("fedavg,clients=3")
    found = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [bool(run.get("failure")) for run in found["runs"]] == [False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fedavgg",), "cell fedavgg: unknown method 'fedavgg' (did you mean fedavg?)"),
        ((), "no method is given"),
        (("fedavg", "--seeds", "4-1"), "--seeds: '4-1' is not allowed"),
        (("fedavg", "--seed", "1"), "--seed: a sweep has several; use --seeds"),
        (("fedavg", "--jobs", "0"), "--jobs: 0 is not allowed"),
        (("fedavg", "-o", "x"), "-o: 'x' is not allowed"),
        (("fedavg", "--grid", "x=1"), "unknown flag of --grid 'x'"),
        (("fedavg", "--grid", "rounds=0,1"), "cell fedavg,rounds=0: --rounds: 0 is not allowed"),
        (("fedavg", "--list", "absent.toml"), "--list: absent.toml cannot be read"),
        (("fedavg", "--select", "personal.nll"), "holds no samples out for validation"),
        (("fedavg", "--select", "personal.entropy"), "does not say which value is better"),
        (("fedavg", "--select", "personal.nll", "--on", "x"), "unknown samples of --on: 'x'"),
        (("fedavg", "--on", "test"), "--on says what --select chooses on; add --select"),
        (("fedavg", *QUICK, "--metric", "personal.nl"), "unknown metric of --metric 'personal.nl'"),
        (("fedavg", *QUICK, "--metric", "personal.rmse"), "unknown metric of --metric"),
        (
            ("fedavg", *QUICK, "--share", "body", "--metric", "global.nll"),
            "unknown metric of --metric 'global.nll'",
        ),
        (
            ("fedavg", *QUICK, "--validation-fraction", "0.2", "--select", "novel.nll"),
            "unknown metric of --select 'validation.novel.nll'",
        ),
        (("fedavg", "--data", "absent.npz"), "absent.npz does not exist; give a file"),
        (("--resume", "absent"), "absent is not the folder of a sweep"),
        (("fedavg", "--resume", "absent"), "the sweep knows its settings; leave out METHOD"),
        (("--rounds", "3", "--resume", "absent"), "leave out --rounds"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(bfl, tmp_path, words, message):
    status, out, err = bfl("sweep", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_metric_that_turns_out_to_be_undefined_leaves_the_default_tables(bfl, tmp_path):
    """Intervals from so few samples are infinitely wide, so that no width is defined."""
    words = ("fedavg", *QUICK, "--calibration-fraction", "0.3", "-o", "dataset.classes=0")
    words += ("--seeds", "0", "--out", "s", "--metric", "calibrated.interval_width95")
    status, out, err = bfl("sweep", *words)
    assert status == 1
    assert "unknown metric of --metric 'calibrated.interval_width95'" in err.splitlines()[-1]
    assert out.splitlines()[-1].startswith("written: results.json, table.md")
    assert "personal.nll" in (tmp_path / "s" / "table.md").read_text()


def test_a_sweep_that_is_asked_to_end_says_how_to_continue(tmp_path):
    command = [sys.executable, "-m", "bflcore.cli", "sweep", "fedavg", *QUICK, "--seeds", "0"]
    command += ["--rounds", "100000", "--out", "s"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while not [*(tmp_path / "s").glob("*/seed-*/checkpoint/*.safetensors")]:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate()
    assert err.splitlines()[1:] == ["interrupted. Continue with: bfl sweep --resume s"]
    assert process.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "s" / "results.json").exists()


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    with show_standing(Path("s"), False) as progress:
        progress(Standing(0, 2, 0, ()))
        progress(Standing(1, 2, 1, ("[b]/seed-0",), 60.0, "a/seed-0", "a [reason]"))
    text = capsys.readouterr().err
    assert "a/seed-0 failed: a [reason]" in text
    assert "1/2" in text


def test_nothing_slow_is_imported_before_the_first_run():
    slow = ("torch", "scipy", "matplotlib", "pandas")
    program = f"import sys, bflcore.cli.sweep; print([n for n in {slow!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == [b"[]"]
