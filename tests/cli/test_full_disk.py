"""A disk without room, at any write: one line says so, and the run goes on once there is room."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..interrupted import TINY, quick, same

WORDS = (
    *("run", "bpfed", *TINY, *quick("bpfed"), "--rounds", "2", "--eval-every", "1", "--quiet"),
    *("--log", "csv", "-o", "engine.memory_limit=0", "--pretrain", "0.2"),
)
MADE = ("open", "os.mkdir", "os.rename", "os.truncate")  # what asks for room, as Python audits it


class Disk:
    """Counts what asks for room in a folder; from the `full`-th time on there is none."""

    folder = None
    full = None
    seen: list = []  # noqa: RUF012 - one disk for the one audit hook, which stays

    @classmethod
    def ask(cls, event, path):
        if cls.folder is None or not str(path).startswith(str(cls.folder)):
            return
        cls.seen.append((event, Path(path).name))
        if cls.full is not None and len(cls.seen) > cls.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def audit(event, arguments):
    if event in MADE and Disk.folder is not None and isinstance(arguments[0], str | Path):
        reads = event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if not reads:
            Disk.ask(event, arguments[0])


@pytest.fixture(scope="module", autouse=True)
def _audited():
    sys.addaudithook(audit)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk that can be made full; syncing asks for room, too."""
    sync = os.fsync

    def synced(descriptor):
        Disk.ask("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        return sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    # Drawing takes most of the time, and writes nothing.
    monkeypatch.setattr("bflcore.report.plots.svg", lambda figure: f"<svg><!-- {figure} --></svg>")
    Disk.folder, Disk.full, Disk.seen = tmp_path / "run", None, []
    yield Disk
    Disk.folder = None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    from bflcore.cli import main

    folder = tmp_path_factory.mktemp("whole")
    with pytest.raises(SystemExit):
        main([*map(str, WORDS), "--out", str(folder / "run")])
    return folder / "run"


def half_written(run):
    return [p for p in run.rglob("*") if p.name.endswith(".writing") or p.name == "memories"]


def refused_and_resumed(bfl, run, whole, make_room, command=WORDS):
    """Run on a full disk, make room and go on: the result is the whole run's."""
    status, out, err = bfl(*command, "--out", run)
    make_room()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "cannot be written (" in err or f"{run} cannot be created (" in err
    if not run.exists():
        assert "start the run again" in err or "cannot be created" in err
        assert bfl(*WORDS, "--out", run)[0] == 0
        return same(run, whole)
    assert not half_written(run)
    assert ("Continue with: bfl resume" in err) or ("Write the report with: bfl report" in err)
    status, _, err = bfl("resume", run, "--quiet")
    assert (status, err) == (0, ""), err
    same(run, whole)
    return None


def steps(bfl, tmp_path, disk):
    """Return every step at which the run asks for room."""
    assert bfl(*WORDS, "--out", tmp_path / "run")[0] == 0
    shutil.rmtree(tmp_path / "run")
    found, disk.seen = disk.seen, []
    return found


def full_at_each(bfl, tmp_path, disk, whole, numbers):
    for number in numbers:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        disk.full, disk.seen = number, []

        def make_room():
            disk.full = None

        refused_and_resumed(bfl, tmp_path / "run", whole, make_room)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads Linux's list of open files")
def test_a_disk_that_is_full_at_any_kind_of_write_costs_nothing(bfl, tmp_path, disk, whole):
    found = steps(bfl, tmp_path, disk)
    assert {event for event, _ in found} == {"open", "os.mkdir", "os.rename", "fsync"}
    first: dict = {}
    for number, (event, name) in enumerate(found):
        file = "a memory" if "#" in name else name.lstrip(".")
        first.setdefault((event, file if event == "open" else ""), number)
    full_at_each(bfl, tmp_path, disk, whole, sorted({*first.values(), len(found) - 1}))


@pytest.mark.thorough
def test_a_disk_that_is_full_at_the_nth_write_costs_nothing_for_all_n(bfl, tmp_path, disk, whole):
    found = steps(bfl, tmp_path, disk)
    full_at_each(bfl, tmp_path, disk, whole, range(len(found)))
    (tmp_path / "steps.txt").write_text(f"{len(found)} steps")


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
@pytest.mark.parametrize("size", [0, 300, 1_500, 3_000, 6_000])
def test_a_write_that_the_system_cuts_short_leaves_nothing_half_written(
    bfl, tmp_path, whole, size, monkeypatch
):
    import resource

    monkeypatch.setattr("bflcore.report.plots.svg", lambda figure: f"<svg><!-- {figure} --></svg>")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        refused_and_resumed(bfl, tmp_path / "run", whole, make_room)
    finally:
        make_room()


def test_a_folder_that_cannot_be_written_is_one_line_when_the_run_is_resumed(bfl, tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    (run / ".lock").unlink()
    (run / ".lock").mkdir()  # as root, a lack of permission cannot be tried
    status, out, err = bfl("resume", run, "--quiet")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {run / '.lock'} cannot be written (")
    assert "make it writable" in err
    assert err.endswith(f"2 rounds are saved. Continue with: bfl resume {run}\n")


@pytest.mark.thorough
@pytest.mark.parametrize("room", range(4, 116, 4))
def test_a_small_file_system_that_fills_up(bfl, tmp_path, whole, room):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("this machine does not let us mount a file system")

    def make_room():
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)

    try:
        refused_and_resumed(bfl, disk / "run", whole, make_room)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
