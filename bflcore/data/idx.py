"""The idx format of MNIST and its successors (LeCun's description), plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = lazy("numpy")

__all__ = ["find_idx", "read_idx"]

UNSIGNED_BYTE = 0x08  # the type code of images and labels


def find_idx(folder: Path, stem: str) -> Path | None:
    """Return the path of `stem` or ``stem.gz`` in `folder`, or None."""
    candidates = (folder / stem, folder / f"{stem}.gz")
    return next((path for path in candidates if path.is_file()), None)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an array of unsigned bytes. Raises `DataError` for a file in another format."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch it again") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE:
        raise DataError(f"{path} is not an idx file of unsigned bytes; fetch it again")
    axes = raw[3]
    header = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", raw[4:header]) if len(raw) >= header else ()
    if len(raw) - header != math.prod(shape):
        raise DataError(f"{path} is truncated or padded: its header says {shape}; fetch it again")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
