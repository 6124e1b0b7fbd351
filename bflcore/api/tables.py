"""Files of tables: predictions, one row per sample, and the examples that a model adapts to."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.data.tables import SUFFIXES, read_table
from bflcore.errors import DataError, OptionError, RunError
from bflcore.files import replace_file
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np

    from bflcore.data.schema import Schema
else:
    np = lazy("numpy")

__all__ = ["check_table", "read_examples", "write_table"]

Columns = Mapping[str, Sequence[object]]


def read_examples(path: Path, schema: Schema | None = None) -> tuple[Any, Any]:
    """Return samples ``[N, ...]`` and their targets ``[N, ...]``: x and y of an .npz file.

    Where the run was trained on a table of a `schema`, a table with its columns and its target is
    read, too. Raises `DataError` for another file.
    """
    if schema is not None and path.suffix.lower() in SUFFIXES:
        table = read_table(path)
        return table, table.column(schema.target, str(path))
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ("x", "y") if name not in file]
            if not missing:
                return file["x"], file["y"]
            found = ", ".join(file.files) or "nothing"
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read ({error}); give an .npz file with x and y"
        ) from None
    raise DataError(f"{path}: array {missing[0]!r} is missing; the file has {found}")


def check_table(path: Path) -> None:
    """Raise `OptionError` for a format that cannot be written, `RunError` without pyarrow."""
    if path.suffix not in WRITERS:
        raise OptionError(
            f"--out: {path} has an unknown format; allowed: a name that ends in "
            f"{', '.join(WRITERS)}"
        )
    if path.suffix == ".parquet" and not find_spec("pyarrow"):
        raise RunError("--out: a .parquet file needs pyarrow: pip install 'bflcore[tables]'")


def write_table(path: Path, columns: Columns) -> None:
    """Replace a table, by its suffix ``.csv``, ``.parquet`` or ``.npz`` (an array per column).

    Raises the errors of `check_table`, and `WriteError` if the file cannot be written.
    """
    check_table(path)
    with replace_file(path, "--out: ") as aside:
        WRITERS[path.suffix](aside, columns)


def _csv(path: Path, columns: Columns) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    path.write_text(text.getvalue(), encoding="utf-8")


def _npz(path: Path, columns: Columns) -> None:
    with path.open("wb") as file:  # given a name, numpy would change its suffix
        np.savez(file, allow_pickle=False, **{name: np.asarray(c) for name, c in columns.items()})


def _parquet(path: Path, columns: Columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)


WRITERS: dict[str, Callable[[Path, Columns], None]] = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".npz": _npz,
}
