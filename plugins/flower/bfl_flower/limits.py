"""What a reply may hold, checked before it is read, and what is shown of a node's text.

Flower has received a message when these checks see it. They keep a reply from making the server
ask for more memory, work through thousands of tensors, or write megabytes into its records.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bflcore.errors import BflError

if TYPE_CHECKING:
    from flwr.app import Array

__all__ = ["NAME", "MalformedError", "check_size", "room_for", "shown"]

FACTOR = 256  # bytes of a reply, in multiples of what was sent: 11 times the largest honest one
SPARE = 64 * 2**20  # bytes that a reply may always have, for metrics by class of a small network
TENSORS = 4096  # per message
TEXT = 2**20  # bytes of JSON per message
NAME = 100  # characters of a tensor's name
SHOWN = 500  # characters of a node's text that enter the records

HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# The folders of a path from the root, a drive, a home or a parent, or of at least two folders.
FOLDER = r"[^\s'\"\\/:;,()<>|]+[\\/]"
PATH = re.compile(
    rf"(?<![\w./\\~<\[-])(?:(?:file://)?(?:[A-Za-z]:|~|\.{{1,2}})?[\\/](?:{FOLDER})*|(?:{FOLDER}){{2,}})"
    r"(?=[^\s'\"\\/:;,()<>|])"
)


class MalformedError(BflError):
    """A message does not have the expected form, or exceeds what one may hold."""


def room_for(sent: int) -> int:
    """Return how many bytes of tensors the reply to a message of `sent` bytes may have."""
    return FACTOR * sent + SPARE


def check_size(text: object, arrays: Mapping[str, Array], room: float) -> None:
    """Raise `MalformedError` unless a message's text and arrays are within the limits.

    The size that an array claims to have is compared with the bytes that came, before any memory
    is asked for. `room` is the number of bytes that all of them may have.
    """
    if not isinstance(text, bytes):
        raise MalformedError(f"expected bytes of JSON, got {type(text).__name__}")
    if len(text) > TEXT:
        raise MalformedError(f"its text has {len(text):,} bytes; allowed: {TEXT:,}")
    if len(arrays) > TENSORS:
        raise MalformedError(f"it has {len(arrays):,} tensors; allowed: {TENSORS:,}")
    if wrong := [name for name in arrays if len(name) > NAME or not name.isprintable()]:
        raise MalformedError(
            f"a tensor is called {wrong[0][:NAME]!r}; allowed: {NAME} printable characters"
        )
    size = sum(len(array.data) for array in arrays.values())
    if size > room:
        raise MalformedError(
            f"its tensors have {size:,} bytes; allowed: {room:,.0f}, {FACTOR} times what was sent "
            f"and {SPARE:,} more"
        )
    for name, array in arrays.items():
        _check_array(name, array)


def _check_array(name: str, array: Array) -> None:
    file = io.BytesIO(array.data)
    try:
        shape, _, dtype = HEADERS[np.lib.format.read_magic(file)](file)
    except (KeyError, ValueError) as error:
        raise MalformedError(f"tensor {name} has no valid header ({error})") from None
    came, claimed = len(array.data) - file.tell(), math.prod(shape) * dtype.itemsize
    if array.stype != "numpy.ndarray" or dtype.hasobject or min(shape, default=0) < 0:
        raise MalformedError(f"tensor {name} is not an array of numbers")
    if came != claimed:
        raise MalformedError(f"tensor {name} claims {claimed:,} bytes, but {came:,} came")


def shown(text: str, private: Iterable[Path] = ()) -> str:
    """Return a node's text as one line of at most `SHOWN` printable characters.

    Folders are left out: of a path remains its last name. `private` are paths that are known, and
    may have spaces.
    """
    text = text[: 100 * SHOWN]
    for path in private:
        for known in (str(path.absolute()), str(path)):
            if len(path.parts) > 1:
                text = text.replace(known, path.name)
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = PATH.sub("", line)
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}... (cut)"
