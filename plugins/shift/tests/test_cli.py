"""``bfl shift`` from the command line."""

import shutil

import attrs
import pytest
from filelock import FileLock

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
    assert (status, err) == (0, "")
    assert "seed 0: 6 of 6" in out
    assert out.splitlines()[-3].split()[0] == "1"  # the leaderboard
    assert Table.read(folder / "bfl-shift.json") == table
    assert (folder / "bfl-shift.svg").read_text().startswith("<svg")
    assert "bfl shift fedvi --seeds 0 --setting toy" in (folder / "bfl-shift.md").read_text()
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
    assert len(err.splitlines()) == 1
    assert "records differ from" in err
    assert "seed 0" in err


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
    ],
)
def test_a_mistake_costs_one_line_and_writes_nothing(bfl, tmp_path, arguments, message):
    status, _, err = bfl("shift", *arguments)
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_two_benchmarks_do_not_share_a_folder(bfl, toy, folder):
    with FileLock(folder / "runs" / ".lock"):
        status, _, err = bfl("shift", "fedvi", "--seeds", "0", "--setting", "toy", "--out", folder)
    assert status == 2
    assert "another process is executing runs" in err
