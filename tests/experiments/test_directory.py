"""The run directory: its lock, its lines of metrics, and the names that it gets."""

import subprocess
import sys

import pytest

from bflcore.errors import RunError
from bflcore.experiments.directory import RunDirectory, default_directory
from bflcore.experiments.integrity import read_lines
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry

HOLD = """
import sys, time
from pathlib import Path
from bflcore.experiments.integrity import read_lines
from bflcore.experiments.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, other):
    directory = RunDirectory(tmp_path)
    with (
        pytest.raises(RunError, match="another process is running in .*; wait for it or stop it"),
        directory.lock(),
    ):
        pytest.fail("two processes hold the lock")
    other.kill()
    other.wait()
    with directory.lock():
        pass


def test_an_error_inside_releases_the_lock_and_is_passed_on(tmp_path):
    directory = RunDirectory(tmp_path)
    with pytest.raises(ZeroDivisionError), directory.lock():
        raise ZeroDivisionError
    with directory.lock():
        pass


def test_lines_after_a_round_and_half_written_ones_are_removed(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.rewind(3) == []
    for number in (1, 2, 3, 4):
        directory.append({"round": number})
    with directory.metrics.open("a") as file:
        file.write('{"round": 2, "tr')
    assert directory.rewind(3) == [{"round": 1}, {"round": 2}, {"round": 3}]
    assert [line["round"] for line in read_lines(directory.metrics)] == [1, 2, 3]
    directory.append({"round": 4})
    assert [line["round"] for line in read_lines(directory.metrics)] == [1, 2, 3, 4]


def test_a_run_that_was_interrupted_during_set_up_says_how_to_start_again(tmp_path):
    (tmp_path / "experiment.toml").write_text("")
    with pytest.raises(RunError, match="interrupted during set-up; start it again: bfl run .*toml"):
        RunDirectory.open(tmp_path)


def test_the_default_directory_does_not_exist_yet(tmp_path):
    experiment = resolve(load_registry(), "fedavg", {}, {"data": {"data": "digits"}})
    names = []
    for _ in range(3):
        folder = default_directory(experiment, tmp_path)
        folder.mkdir()
        names.append(folder.name)
    assert names == ["fedavg-digits-0", "fedavg-digits-0-2", "fedavg-digits-0-3"]
