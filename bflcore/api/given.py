"""Data that Python holds: data frames, dicts, arrays, torch and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bflcore.data.tables import Table
from bflcore.data.user import ALLOWED, Arrays
from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["as_table", "own_data"]

FORMS = (
    "a data frame or a dict of columns (with target=), a dict or tuple of arrays x, y and client, "
    "a torch or a Hugging Face data set"
)


def own_data(data: Any, flags: Mapping[str, Any]) -> tuple[Table | Arrays, dict[str, Any]]:
    """Return the data given as `data`, and the `flags` that are left.

    ``target`` and ``client`` are names of columns in a table; beside samples ``[N, ...]`` they are
    arrays ``[N]``. Raises `DataError` for another type.
    """
    left = dict(flags)
    if isinstance(data, Mapping) and "x" in data and {*data} <= {*ALLOWED}:
        return Arrays({name: np.asarray(array) for name, array in data.items()}), left
    table = as_table(data)
    if table is not None:
        return table, left
    beside = {"y": left.pop("target", None), "client": left.pop("client", None)}
    arrays = {name: np.asarray(array) for name, array in beside.items() if array is not None}
    if isinstance(data, tuple) and len(data) in {2, 3}:
        return Arrays(dict(zip(ALLOWED, map(np.asarray, data), strict=False)) | arrays), left
    if hasattr(data, "shape"):
        return Arrays({"x": np.asarray(data)} | arrays), left
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        return Arrays(_items(data) | arrays), left
    raise DataError(f"data: {type(data).__name__} is not allowed; allowed: {FORMS}")


def as_table(data: Any) -> Table | None:
    """Return a data frame, dict of columns, list of dicts or Hugging Face data set as a table.

    None for anything else, such as an array.
    """
    if isinstance(data, Mapping):
        if any(hasattr(split, "column_names") for split in data.values()):
            raise DataError(f"data has the splits {', '.join(data)}; give one of them")
        columns = {str(name): np.asarray(values) for name, values in data.items()}
        lengths = {name: column.shape[:1] for name, column in columns.items()}
        if len({*lengths.values()}) > 1:
            raise DataError(f"data: columns have different lengths: {lengths}; give them the same")
        return Table(columns)
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        names = dict.fromkeys(name for row in data for name in row)
        rows = {str(name): _objects([row.get(name) for row in data]) for name in names}
        return Table(rows)
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return Table({name: _of_features(data, name) for name in data.column_names})
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):
        return Table({str(name): np.asarray(data[name].to_numpy()) for name in data.columns})
    return None


def _of_features(data: Any, name: str) -> Any:
    """Return a column of a Hugging Face data set; labels by name."""
    values = list(data[name])
    named = getattr(data.features[name], "int2str", None)
    if named:
        values = [None if value is None else named(value) for value in values]
    return np.asarray(values) if None not in values else _objects(values)


def _items(data: Any) -> dict[str, Any]:
    """Stack the items of a torch data set: tuples of x, y and perhaps an owner."""
    first = data[0]
    if not isinstance(first, tuple | list) or len(first) not in {2, 3}:
        raise DataError(
            f"data: an item of {type(data).__name__} is {type(first).__name__}; allowed: (x, y) "
            "or (x, y, client)"
        )
    columns = zip(*(data[place] for place in range(len(data))), strict=True)
    return {
        name: np.stack([np.asarray(value) for value in column])
        for name, column in zip(ALLOWED, columns, strict=False)
    }


def _objects(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), object)
    found[:] = values
    return found
