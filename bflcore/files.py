"""Replacing files so that a reader, or a crash, meets the old content or the new one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bflcore.errors import DataError, WriteError

__all__ = [
    "append_text",
    "check_fits",
    "check_unpacked",
    "make_folder",
    "replace_file",
    "sync",
    "write_text",
    "writing",
]

ASIDE = ".writing"  # ends the names of files that are being written
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, flag: str = "") -> Iterator[None]:
    """Raise `WriteError`, in one line, for what the system says while `path` is written.

    `flag` names the option with the path, for example ``"--out: "``.
    """
    try:
        yield
    except Exception as error:
        from safetensors import SafetensorError  # it is not needed to start

        if not isinstance(error, OSError | SafetensorError):
            raise
        raise WriteError(f"{flag}{path} cannot be written {_cause(error, path)}") from None


def _cause(error: Exception, path: Path) -> str:
    """Return what the system says, how much room there is, and the next step."""
    number = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"os error (\d+)", str(error)):  # as other languages' libraries say it
        number = int(found[1])
    said = os.strerror(number) if number else " ".join(str(error).split())
    if number not in FULL:
        return f"({said}); make it writable, or choose another folder"
    with suppress(OSError):
        there = next(folder for folder in path.absolute().parents if folder.exists())
        said += f", {shutil.disk_usage(there).free / 2**20:,.1f} MiB are free"
    return f"({said}); free disk space"


@contextmanager
def replace_file(path: Path, flag: str = "") -> Iterator[Path]:
    """Yield a path beside `path` to write to; at the end, sync that file and rename it to `path`.

    If the block raises, `path` is left as it was. The file gets the permissions of any new file,
    also from a library that writes private ones. Raises `WriteError`; see `writing`.
    """
    aside = path.with_name(f".{path.name}{ASIDE}")
    try:
        with writing(path, flag):
            aside.write_bytes(b"")
            permissions = aside.stat().st_mode
            yield aside
            aside.chmod(permissions)
            sync(aside)
            aside.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def write_text(path: Path, text: str, flag: str = "") -> None:
    """Replace the content of a text file. Raises `WriteError`; see `writing`."""
    with replace_file(path, flag) as aside:
        aside.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str) -> None:
    """Add text to a file, all of it or, with a `WriteError`, nothing."""
    with writing(path):
        size = path.stat().st_size if path.exists() else None
        try:
            with path.open("ab") as file:
                file.write(text.encode())
        except OSError:
            with suppress(OSError):
                path.unlink() if size is None else os.truncate(path, size)
            raise


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create a folder, with `parents` those above it, too, unless it is there.

    Raises `WriteError`. A run directory that somebody removed is not made again.
    """
    with writing(path):
        path.mkdir(parents=parents, exist_ok=True)


def check_unpacked(path: Path) -> None:
    """Raise `DataError` if what a zip archive says that it holds does not fit in memory.

    Other files pass: whoever reads them finds out.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_fits(path, sum(member.file_size for member in archive.infolist()))
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return


def check_fits(path: Path, size: int) -> None:
    """Raise `DataError` if `size` bytes are more than half of this machine's memory."""
    allowed = memory() // 2
    if size > allowed:
        raise DataError(
            f"{path} would need {size / 2**30:,.1f} GiB of memory; allowed: {allowed / 2**30:,.1f} "
            "GiB, half of this machine's; divide the file"
        )


def memory() -> int:
    """Return the bytes of memory of this machine; 16 GiB where that is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 16 * 2**30


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
