"""Tables as users have them: .csv and .parquet files, a folder of them, one per client.

A table maps the names of its columns to vectors ``[N]`` of any type. Missing values are empty
fields of a .csv file, one of the words `MISSING`, None, or NaN.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = [
    "MISSING",
    "SUFFIXES",
    "TRUTH",
    "Table",
    "is_date",
    "missing",
    "numbers",
    "read_folder",
    "read_table",
    "texts",
]

MISSING = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "#N/A", "<NA>", "?"})
SUFFIXES = (".csv", ".tsv", ".parquet")
TRUTH = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T]|$)")


@attrs.frozen(eq=False)
class Table:
    """Columns ``[N]`` by name; `name` is what errors call the table."""

    columns: Mapping[str, Any]
    name: str = "data"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, rows: slice) -> Table:
        return Table({name: column[rows] for name, column in self.columns.items()}, self.name)

    def column(self, name: str, flag: str) -> Any:
        """Return a column. Raises `DataError` naming the `flag` that asked for it."""
        if name not in self.columns:
            raise DataError(
                f"{flag}: {self.name} has no column {name!r}; it has {', '.join(self.columns)}"
            )
        return self.columns[name]


def read_table(path: Path) -> Table:
    """Read a .csv, .tsv or .parquet file.

    Raises `DataError` for a file that is missing, damaged, or without a sample.
    """
    try:
        read = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
        columns = read(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give a file {' or '.join(SUFFIXES)}") from None
    except (OSError, ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({reason}); write it as UTF-8") from None
    if not columns or not len(next(iter(columns.values()))):
        raise DataError(f"{path} has no samples; give a table with names in its first line")
    return Table(columns, str(path))


def read_folder(folder: Path, client: str) -> Table:
    """Read one table per client; the column `client` holds the names of the files.

    Raises `DataError` unless all files have the same columns.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(
            f"--data: {folder} has no table; allowed: one file {' or '.join(SUFFIXES)} per client"
        )
    tables = [read_table(path) for path in files]
    names = list(tables[0].columns)
    for table in tables:
        if odd := set(names) ^ set(table.columns):
            raise DataError(
                f"{folder}: column {min(odd)!r} is not in all files (compare {files[0].name} and "
                f"{Path(table.name).name}); give all files the same columns, empty where need be"
            )
    joined = {name: _joined([table.columns[name] for table in tables]) for name in names}
    ids = np.repeat(np.array([path.stem for path in files], object), [len(t) for t in tables])
    return Table(joined | {client: ids}, str(folder))


def missing(values: Any) -> Any:
    """Return which of the values ``[N]`` are missing."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind in "iub":
        return np.zeros(len(values), bool)
    return np.array([_is_missing(value) for value in values], bool)


def numbers(values: Any, gaps: Any) -> Any:
    """Return values ``[N]`` as float64, NaN in the `gaps` ``[N]``; None if they are not numbers.

    Truth values and the words true, false, yes and no are 1 and 0.
    """
    found = np.full(len(values), np.nan)
    if values.dtype.kind in "iufb":
        found[~gaps] = values[~gaps]
        return found
    given = values[~gaps]
    words = {str(value).strip().lower() for value in islice(given, 100)}
    convert = TRUTH.__getitem__ if words and words <= TRUTH.keys() else float
    try:
        found[~gaps] = [
            convert(v.strip().lower()) if isinstance(v, str) else float(v) for v in given
        ]
    except (KeyError, TypeError, ValueError):
        return None
    return found


def texts(values: Any, gaps: Any) -> list[str]:
    """Return values ``[N]`` as text, ``""`` in the `gaps` ``[N]``; 7.0 is ``7``."""
    return [
        "" if gap else str(int(v)) if isinstance(v, float) and v.is_integer() else str(v).strip()
        for v, gap in zip(values.tolist(), gaps, strict=True)
    ]


def is_date(values: Any, gaps: Any) -> bool:
    """Return whether values ``[N]`` are dates or times, as objects or as text."""
    if values.dtype.kind in "Mm":
        return True
    given = values[~gaps]
    return (
        values.dtype.kind in "OUS" and len(given) > 0 and all(_names_day(value) for value in given)
    )


def _names_day(value: Any) -> bool:
    if isinstance(value, str):
        return DATE.match(value.strip()) is not None
    return hasattr(value, "year") or isinstance(value, np.datetime64)


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in MISSING
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ in {"NAType", "NaTType"}  # pandas's own


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate([part.astype(object) for part in parts])


def _read_csv(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        rows = csv.reader(file, delimiter=max(",;\t", key=first.count))
        header = [name.strip() or "unnamed" for name in next(rows, [])]
        if twice := {name for name in header if header.count(name) > 1}:
            raise DataError(f"{path} has two columns {min(twice)!r}; give each its own name")
        kept = []
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {rows.line_num}: {len(row)} fields, but the first line names "
                    f"{len(header)} columns; quote fields that contain the separator"
                )
            kept.append(row)
    return {
        name: np.array(column, object)
        for name, column in zip(header, zip(*kept, strict=True), strict=False)
    }


def _read_parquet(path: Path) -> dict[str, Any]:
    try:
        from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow: pip install 'bflcore[tables]'"
        ) from None
    table = parquet.read_table(path)
    return {
        name: column.to_numpy() if column.null_count == 0 else _objects(column.to_pylist())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _objects(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), object)
    found[:] = values
    return found
