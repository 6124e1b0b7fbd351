"""Samples to predict: from files, and from the form in which users have them to the network's."""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.api.given import as_table
from bflcore.data.tables import SUFFIXES, Table, read_table
from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from bflcore.data.schema import Schema
    from bflcore.experiments.description import Description
else:
    np = lazy("numpy")
    torch = lazy("torch")

__all__ = ["read_samples", "samples", "targets"]


def samples(x: Any, described: Description) -> Tensor:
    """Return raw samples as the run's own samples were before standardisation: ``[B, ...]``.

    `x` is a tensor, an array or a list ``[B, *shape]``; bytes are scaled as those of the training
    data were. Where the run was trained on a table, `x` is one, too: a data frame, a dict of
    columns or a list of dicts; of numbers alone, also an array ``[B, columns]``. Missing values
    become NaN; what is ignored is a warning. Raises `DataError` for another shape or type, or for
    values that are not finite.
    """
    if described.schema is not None:
        found = _of_table(x, described.schema)
        if not described.standardise and np.isnan(found).any():
            raise DataError(
                "x has missing values, but the model was trained without standardisation, which "
                "would replace them; fill them in"
            )
        return torch.as_tensor(found)
    given = x if isinstance(x, torch.Tensor) else np.asarray(x)
    if not isinstance(given, torch.Tensor):
        if given.dtype.kind not in "fiub":
            raise DataError(f"x has type {given.dtype}; allowed: numbers")
        given = torch.as_tensor(given)
    if tuple(given.shape[1:]) != described.shape or given.ndim == 0:
        alone = tuple(given.shape) == described.shape
        hint = "give one sample as x[None]" if alone else "give one row per sample"
        raise DataError(
            f"x has shape {list(given.shape)}, but the model's samples have shape "
            f"{list(described.shape)}; {hint}"
        )
    if given.dtype == torch.uint8:
        if described.byte is None:
            raise DataError(
                "x has type uint8, but the model was trained on real numbers; convert it as the "
                "training data were"
            )
        result = given / described.byte
    else:
        result = given.to(torch.float32)
    if not bool(result.isfinite().all()):
        raise DataError("x has NaN, infinity or more than float32 holds; remove it")
    return 2 * result - 1 if described.input_range == "-1,1" else result


def _of_table(x: Any, schema: Schema) -> Any:
    """Return the features ``[B, F]`` of rows given with names, or by position."""
    table = x if isinstance(x, Table) else as_table(x)
    if table is not None:
        found, notes = schema.read(table)
        for note in notes:
            warnings.warn(note, stacklevel=5)
        return found
    given = np.asarray(x)
    if given.dtype.kind not in "fiub" or given.ndim != 2 or given.shape[1] != len(schema.columns):
        names = ", ".join(column.name for column in schema.columns[:5])
        more = ", ..." if len(schema.columns) > 5 else ""
        raise DataError(
            f"x has shape {list(given.shape)}, but the model was trained on a table with the "
            f"columns {names}{more}; give a data frame or a list of dicts"
        )
    if np.isinf(given).any():
        raise DataError("x has infinity; remove it")
    return schema.read_numbers(given)


def targets(y: Any, described: Description, count: int) -> Tensor:
    """Return the targets of `count` samples: class labels ``[N]``, or real targets ``[N, T]``.

    Labels may be given by name. Raises `DataError` for others than the run's.
    """
    given = np.asarray(y)
    if len(given) != count:
        raise DataError(f"x has {count} samples, y has {len(given)}; both must be the same")
    if described.task == "regression":
        real = given.reshape(count, -1)
        if real.dtype.kind not in "fiu" or real.shape[1] != described.outputs:
            raise DataError(
                f"y has shape {list(given.shape)} and type {given.dtype}; allowed: numbers, "
                f"{described.outputs} per sample"
            )
        return torch.as_tensor(real.astype(np.float32))
    number = {name: label for label, name in enumerate(described.classes)}
    labels = np.array([number.get(str(name), -1) for name in given.reshape(-1)], np.int64)
    if given.dtype.kind in "iu" and given.ndim == 1 and (labels < 0).all():
        labels = given.astype(np.int64)  # numbers of classes that have other names
    if len(labels) != count or labels.min(initial=0) < 0 or labels.max(initial=0) >= len(number):
        raise DataError(f"y has other labels than the run; allowed: {', '.join(described.classes)}")
    return torch.as_tensor(labels)


def read_samples(path: Path, shape: tuple[int, ...], schema: Schema | None = None) -> Any:
    """Read samples ``[B, *shape]``: ``x`` of an .npz file, or a .csv or .parquet file of numbers.

    With the `schema` of a run on a table, also a table with names. A first line of a .csv file that
    is not numeric holds names. Raises `DataError` for another kind of file or content.
    """
    if schema is not None and path.suffix.lower() in SUFFIXES:
        return read_table(path)
    if path.suffix not in {".npz", ".csv", ".parquet"}:
        raise DataError(
            f"{path} cannot be read; allowed: an .npz file with x, or a .csv or .parquet file"
        )
    try:
        if path.suffix == ".npz":
            return _npz(path)
        return (_csv if path.suffix == ".csv" else _parquet)(path, shape)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); give samples {list(shape)}") from None


def _npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as file:
        if "x" not in file:
            found = ", ".join(file.files) or "nothing"
            raise DataError(f"{path}: array 'x' is missing; the file has {found}")
        return file["x"]


def _csv(path: Path, shape: tuple[int, ...]) -> Any:
    with path.open(encoding="utf-8") as file:
        lines = [line for line in (file.readline(), file.readline()) if line.strip()]
    first = lines[0].strip().split(",") if lines else []
    if len(lines) <= (not _numeric(first)):
        raise DataError(f"{path} has no samples")
    table = np.loadtxt(
        path, np.float32, delimiter=",", skiprows=0 if _numeric(first) else 1, ndmin=2
    )
    return _shaped(path, table, shape)


def _parquet(path: Path, shape: tuple[int, ...]) -> Any:
    columns = read_table(path).columns
    return _shaped(path, np.array([*columns.values()], np.float32).T, shape)


def _shaped(path: Path, table: Any, shape: tuple[int, ...]) -> Any:
    width = math.prod(shape)
    if table.size and table.shape[1] != width:
        raise DataError(
            f"{path} has {table.shape[1]} columns, but the model's samples have {width} values"
        )
    return table.reshape(-1, *shape)


def _numeric(words: list[str]) -> bool:
    try:
        return bool(words) and all(math.isfinite(float(word)) for word in words)
    except ValueError:
        return False
