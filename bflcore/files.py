"""Replacing files so that a reader, or a crash, meets the old content or the new one."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bflcore.errors import DataError

__all__ = ["check_fits", "check_unpacked", "replace_file", "sync", "write_text"]


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; at the end, sync that file and rename it to `path`.

    If the block raises, `path` is left as it was. The file gets the permissions of any new file,
    also from a library that writes private ones. Raises `OSError` like any write.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.write_bytes(b"")
        permissions = aside.stat().st_mode
        yield aside
        aside.chmod(permissions)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the content of a text file."""
    with replace_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


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
