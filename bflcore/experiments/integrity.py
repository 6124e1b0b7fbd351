"""Digests in the files of a run, so that a damaged or edited file is noticed.

Each JSON file has the key ``digest``. In a file of lines, a line's digest also covers the lines
before it. Wall-clock times are left out: runs with equal results have equal digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.errors import RunError
from bflcore.files import write_text

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "add_digest",
    "check_digest",
    "digest_of",
    "parse_line",
    "read_json",
    "read_lines",
    "tensor_digest",
    "write_json",
]

KEY = "digest"
TIMES = "seconds"  # wall-clock times: no result
AGAIN = "restore the file, or start the run again"


def digest_of(value: Any, before: str = "") -> str:
    """Return the digest of plain values, and of what came `before`, as 64 hexadecimal digits."""
    text = before + json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a text and of named tensors ``[...]`` on the CPU."""
    import torch

    found = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # Cloned: a tensor of one element or none counts as contiguous with any stride.
        flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def add_digest(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return plain values with their digest; `before` is the digest of the line before."""
    plain = json.loads(json.dumps(value))  # as it is read back: keys are text
    return {**plain, KEY: _digest(plain, before)}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by indented JSON with a digest. Raises `WriteError` if it cannot be."""
    write_text(path, json.dumps(add_digest(value), indent=2) + "\n")


def read_json(path: Path, step: str = AGAIN) -> dict[str, Any]:
    """Return the values that `write_json` wrote.

    Raises `FileNotFoundError` if there is no file, and `RunError`, with the next `step`, if it is
    damaged.
    """
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({_cause(error)}); {step}") from None


def parse_line(line: str, before: str) -> tuple[dict[str, Any], str]:
    """Return the values of one line without their digest, and the digest.

    Raises `ValueError` for a damaged line, or one that does not follow the line `before`.
    """
    value = json.loads(line)
    return _checked(value, before), value[KEY]


def read_lines(path: Path, *, growing: bool = False) -> list[dict[str, Any]]:
    """Return the values of a file of lines; in a `growing` one, the last may be incomplete.

    Raises `FileNotFoundError` if there is no file, and `RunError` naming a damaged line.
    """
    found, digest = [], ""
    lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
    if growing and lines and not lines[-1].endswith("\n"):
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            value, digest = parse_line(line, digest)
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{path}: line {number} cannot be read ({_cause(error)}); {AGAIN}"
            ) from None
        found.append(value)
    return found


def _checked(value: Any, before: str = "") -> dict[str, Any]:
    given = value if isinstance(value, dict) else {}
    content = {name: item for name, item in given.items() if name != KEY}
    check_digest(given.get(KEY), _digest(content, before))
    return content


def check_digest(given: Any, expected: str) -> None:
    """Raise `ValueError` unless the digest of a file is that of its content."""
    if given is None:
        raise ValueError("it has no digest: it is damaged, or of an earlier version of bflcore")
    if given != expected:
        raise ValueError("its content does not match its digest: it was damaged or edited")


def _digest(value: Mapping[str, Any], before: str) -> str:
    return digest_of({name: item for name, item in value.items() if name != TIMES}, before)


def _cause(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
