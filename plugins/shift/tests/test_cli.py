"""``bfl shift`` from the command line."""

import shutil
import signal
import subprocess
import sys

import attrs
import pytest
from filelock import FileLock

from bfl_shift import cli, settings
from bfl_shift.settings import CLEAN, NOISY
from bfl_shift.table import Table


@pytest.fixture
def folder(executed, tmp_path):
    """Return a copy of the tiny benchmark's folder, as a killed command would leave it."""
    shutil.copytree(executed[0].folder, tmp_path / "out")
    return tmp_path / "out"


def test_the_command_finishes_what_is_there_and_writes_table_page_and_picture(
    bfl, toy, table, folder
):
    shutil.rmtree(folder / "runs" / "clean.local" / "seed-0")  # one run had not been started
    shutil.rmtree(folder / "scores")
    status, out, err = bfl(
        "shift", "fedvi", "--seeds", "0", "--setting", "toy", "--out", folder, "--jobs", "1"
    )
    assert status == 0
    assert f"6 runs in {folder / 'runs'}, 5 of them finished" in err.splitlines()[0]
    assert "6/6  clean.local/seed-0  done" in err
    assert out.splitlines()[-3].split()[0] == "1"  # the leaderboard
    assert Table.read(folder / "bfl-shift.json") == table
    assert (folder / "bfl-shift.svg").read_text().startswith("<svg")
    assert "bfl shift fedvi --seeds 0 --setting toy" in (folder / "bfl-shift.md").read_text()
    assert Table.read(folder / "bfl-shift.json").seconds["scoring"].keys() >= {"clean.local/seed-0"}
    rivals = ("--table", folder / "bfl-shift.json")
    bfl("shift", "local", "--seeds", "0", "--setting", "toy", "--out", folder, *rivals)
    assert "`fedvi`" in (folder / "bfl-shift.md").read_text()  # from the table
    assert Table.read(folder / "bfl-shift.json").methods == ("local",)


def test_a_check_names_what_differs(bfl, toy, table, tmp_path):
    records = [attrs.evolve(record, digest="0") for record in table.records]
    path = tmp_path / "spoilt.json"
    attrs.evolve(table, records=records).write(path)
    arguments = ("--check", "0.1", "--setting", "toy", "--table", path, "--jobs", "1")
    status, out, err = bfl("shift", *arguments)
    assert status == 2
    assert "differs in" in out
    first, *_, last = err.splitlines()
    assert first == "1 runs in a temporary folder, 0 of them finished"
    assert "records differ from" in last
    assert "seed 0" in last


def test_a_check_needs_a_table(bfl, toy):
    status, _, err = bfl("shift", "--check", "0.1", "--setting", "toy")
    assert status == 2
    assert "runs/bfl-shift/bfl-shift.json does not exist" in err


def test_shifts_and_settings_are_explained(bfl):
    status, out, _ = bfl("shift", "--list")
    assert status == 0
    for name in ("small", "large", "rotation", "prior-shift", "ood-mnist5k"):
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--setting", "smal"), "unknown setting 'smal' (did you mean small?)"),
        (("--shifts", "blurr"), "unknown shift 'blurr' (did you mean blur?)"),
        (("--seeds", "2-1"), "--seeds: '2-1' is not allowed"),
        (("--jobs", "0", "local", "--shifts", "blur"), "--jobs: 0 is not allowed"),
        (("fedavgg",), "unknown method 'fedavgg' (did you mean fedavg"),
        (("--table", "none.json"), "none.json does not exist"),
        (("local", "--table", "published", "--seeds", "0-3"), "--table: it has no seed 3; allowed"),
        (("local", "--table", "published", "--setting", "large"), "--table: it is of the setting"),
    ],
)
def test_a_mistake_costs_one_line_and_writes_nothing(bfl, tmp_path, arguments, message):
    status, _, err = bfl("shift", *arguments)
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_a_run_that_failed_is_named_and_decides_the_exit_status(bfl, toy, tmp_path):
    broken = {**toy.flags, "likelihood": "gaussian"}
    del broken["calibrate"]
    settings.SETTINGS[toy.name] = attrs.evolve(toy, trainings={CLEAN: {}, NOISY: broken})
    arguments = ("fedvi", "--shifts", "label-noise", "--seeds", "0", "--setting", "toy")
    status, out, err = bfl("shift", *arguments, "--jobs", "1")
    assert status == 1
    assert "missing: label-noise, fedvi, seed 0: " in err
    assert out.splitlines()[-1] == "page: runs/bfl-shift/bfl-shift.md"
    page = (tmp_path / "runs" / "bfl-shift" / "bfl-shift.md").read_text()
    assert "### reference" in page
    assert "### label-noise" not in page


def test_a_benchmark_that_is_asked_to_end_says_how_to_continue(tmp_path):
    command = [sys.executable, "-m", "bflcore.cli", "shift", "local", "--shifts", "tiny-clients"]
    command += ["--seeds", "0", "--jobs", "1", "--out", "s"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "2 runs in s/runs, 0 of them finished\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert err == "interrupted. Continue with the same command\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_the_published_table_is_named_and_not_searched_for(bfl, toy, monkeypatch, table, tmp_path):
    path = tmp_path / "elsewhere.json"
    table.write(path)
    monkeypatch.setattr(cli.tables, "PUBLISHED", path)
    arguments = ("local", "--seeds", "0", "--setting", "toy", "--jobs", "1", "--table", "published")
    assert bfl("shift", *arguments)[0] == 0
    assert "`fedvi`" in (tmp_path / "runs" / "bfl-shift" / "bfl-shift.md").read_text()


def test_two_benchmarks_do_not_share_a_folder(bfl, toy, folder):
    with FileLock(folder / "runs" / ".lock"):
        status, _, err = bfl("shift", "fedvi", "--seeds", "0", "--setting", "toy", "--out", folder)
    assert status == 2
    assert "another process is executing runs" in err
