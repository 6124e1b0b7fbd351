"""Files that are replaced: the old content or the new one, whatever happens."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from bflcore.errors import DataError, WriteError
from bflcore.files import (
    append_text,
    check_fits,
    check_unpacked,
    make_folder,
    memory,
    replace_file,
    write_text,
    writing,
)


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    write_text(tmp_path / "a.txt", "new ä")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "new ä"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    def fail():
        with replace_file(tmp_path / "a.txt") as aside:
            aside.write_text("half of the new")
            raise error

    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(error):
        fail()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads Linux's list of open files")
def test_the_content_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    seen = []
    replace, sync = os.replace, os.fsync

    def noted_sync(descriptor):
        seen.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(
        "pathlib.Path.replace",
        lambda self, target: (seen.append(("rename", str(target))), replace(self, target)),
    )
    write_text(tmp_path / "a.txt", "x")
    assert seen == [
        ("sync", str(tmp_path / ".a.txt.writing")),
        ("rename", str(tmp_path / "a.txt")),
        ("sync", str(tmp_path)),
    ]


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_file_is_as_readable_as_any_other_whoever_wrote_it(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "any").touch()
    with replace_file(tmp_path / "a.safetensors") as aside:
        save_file({"w": torch.zeros(1)}, aside)  # writes private files
    expected = (tmp_path / "any").stat().st_mode
    assert (tmp_path / "a.safetensors").stat().st_mode == expected


def test_an_archive_that_does_not_fit_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(3_000_000, np.uint8))
    assert (tmp_path / "a.npz").stat().st_size < 10_000
    check_unpacked(tmp_path / "a.npz")
    monkeypatch.setattr("bflcore.files.memory", lambda: 4_000_000)
    with pytest.raises(DataError, match="a.npz would need 0.0 GiB of memory; allowed: 0.0 GiB"):
        check_unpacked(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"not an archive")
    check_unpacked(tmp_path / "b.npz")  # whoever reads it finds out


def test_the_machines_memory_is_known():
    assert 2**28 < memory() < 2**50
    check_fits(Path("a"), memory() // 4)


def said_of(error, path, flag=""):
    """Return the one line about an error while a path is written."""
    with pytest.raises(WriteError) as found, writing(path, flag):
        raise error
    return str(found.value)


def test_what_the_system_says_becomes_one_line_with_the_room_and_the_next_step(tmp_path):
    full = said_of(OSError(errno.ENOSPC, "?"), tmp_path / "new" / "a")
    assert full.startswith(f"{tmp_path / 'new' / 'a'} cannot be written (No space left on device, ")
    assert full.endswith(" MiB are free); free disk space")
    closed = said_of(PermissionError(errno.EACCES, "?"), tmp_path / "a", "--out: ")
    assert closed.startswith("--out: ")
    assert closed.endswith("(Permission denied); make it writable, or choose another folder")
    rust = SafetensorError('Error: IoError(Os { code: 28, kind: "x" }): gone (os error 28)')
    assert "(No space left on device, " in said_of(rust, tmp_path / "a")
    with pytest.raises(ValueError, match="not about files"), writing(tmp_path):
        raise ValueError("not about files")


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    path = tmp_path / "lines"
    append_text(path, "one\n")
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))
    try:
        for name in ("lines", "others"):
            with pytest.raises(WriteError, match=f"{name} cannot be written"):
                append_text(tmp_path / name, "two and three\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "one\n"
    assert not (tmp_path / "others").exists()
    append_text(path, "two\n")
    assert path.read_text() == "one\ntwo\n"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    make_folder(tmp_path / "a" / "b", parents=True)
    make_folder(tmp_path / "a" / "b", parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file/b cannot be written"):
        make_folder(tmp_path / "file" / "b")
