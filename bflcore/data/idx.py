"""The idx format of MNIST and its successors (LeCun's description), plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from bflcore.errors import DataError
from bflcore.files import check_fits
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = lazy("numpy")

__all__ = ["find_idx", "read_idx"]

UNSIGNED_BYTE = 0x08  # the type code of images and labels
MOST_AXES = 8


def find_idx(folder: Path, stem: str) -> Path | None:
    """Return the path of `stem` or ``stem.gz`` in `folder`, or None."""
    candidates = (folder / stem, folder / f"{stem}.gz")
    return next((path for path in candidates if path.is_file()), None)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an array of unsigned bytes.

    Its size is known before it is read. Raises `DataError` for a file in another format, or one
    that does not fit in memory.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            shape = _shape(path, file)
            size = math.prod(shape)
            check_fits(path, math.prod(max(1, side) for side in shape))
            raw = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch it again") from None
    if len(raw) != size:
        raise DataError(f"{path} is truncated or padded: its header says {shape}; fetch it again")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _shape(path: Path, file: gzip.GzipFile | BufferedReader) -> tuple[int, ...]:
    """Read the header of an idx file: the sizes of its axes."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTE:
        raise DataError(f"{path} is not an idx file of unsigned bytes; fetch it again")
    axes = magic[3]
    if not 1 <= axes <= MOST_AXES:
        raise DataError(f"{path} has {axes} axes; allowed: 1 to {MOST_AXES}; fetch it again")
    sizes = file.read(4 * axes)
    if len(sizes) < 4 * axes:
        raise DataError(f"{path} is truncated in its header; fetch it again")
    return struct.unpack(f">{axes}I", sizes)
