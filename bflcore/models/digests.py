"""Digests of what a run reads besides its settings: a user's own data and own network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.data.tables import Table
from bflcore.data.user import MEMORY, OwnData
from bflcore.models.user import UserModel

if TYPE_CHECKING:
    from bflcore.data.base import DataSource
    from bflcore.data.user import Arrays
    from bflcore.models.base import Model
    from bflcore.options.settings import DataSettings

__all__ = ["source_digests"]


def source_digests(
    dataset: DataSource, data: DataSettings, model: Model, own: Table | Arrays | None
) -> dict[str, str]:
    """Return digests of the user's own data (`own` where Python holds them) and own network.

    Settings with the same digests give the same runs. What is not there has none: a run will say
    what it misses.
    """
    found = {}
    if own is not None:
        columns = own.columns if isinstance(own, Table) else own.arrays
        found["content of the data"] = _of_columns(columns)
    elif isinstance(dataset, OwnData) and data.data != MEMORY:
        path = Path(data.data)
        if path.exists():
            found["content of the data"] = _of_files(path)
    if isinstance(model, UserModel) and model.source:
        found["content of the model's file"] = _of_files(Path(model.source))
    return found


def _of_files(path: Path) -> str:
    """Return the digest of a file, or of a folder's files with their names."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(f"\n{file.relative_to(path)}\n".encode() if path.is_dir() else b"")
            with file.open("rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def _of_columns(columns: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name, column in columns.items():
        found.update(f"\n{name} {column.dtype} {column.shape}\n".encode())
        plain = column.dtype.kind in "biufcSU"
        found.update(column.tobytes() if plain else repr(column.tolist()).encode())
    return found.hexdigest()
