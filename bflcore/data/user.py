"""A user's own data: a table, a folder of tables, an .npz file, or what Python holds."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.data.base import Dataset, DataSource
from bflcore.data.schema import NUMBER, Column, Schema
from bflcore.data.tables import SUFFIXES, Table, missing, read_folder, read_table, texts
from bflcore.data.targets import Targets, owners_of, targets_of
from bflcore.errors import DataError, OptionError
from bflcore.files import check_unpacked
from bflcore.lazy import lazy
from bflcore.options import component, option

if TYPE_CHECKING:
    import numpy as np

    from bflcore.options.settings import DataSettings
else:
    np = lazy("numpy")

__all__ = ["FORMS", "MEMORY", "TABLE_FLAGS", "Arrays", "OwnData", "is_own", "load_npz", "load_rows"]

MEMORY = "memory"  # stands for data that were given from Python
FORMS = "a file .npz, .csv, .tsv or .parquet, or a folder with one table per client"
FOLDER_OWNER = "(file)"  # the column of owners in a folder of tables
TABLE_FLAGS = ("target", "client", "drop")
ALLOWED = ("x", "y", "client", "x_test", "y_test", "client_test")

# What numpy and zipfile raise for files that are damaged, encrypted, or not an archive.
UNREADABLE = (
    MemoryError,
    OSError,
    OverflowError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    AttributeError,
    TypeError,
    RuntimeError,
)


@attrs.frozen(eq=False)
class Arrays:
    """Arrays ``[N, ...]`` under the names of `ALLOWED`; `name` is what errors call them."""

    arrays: Mapping[str, Any]
    name: str = "data"


@component
class OwnData(DataSource):
    """Your own data: `--data` with a file .npz, .csv, .tsv or .parquet, or a folder of tables."""

    name = "own"

    standardise: bool | None = option(
        None, "scale features (and targets) to mean 0, variance 1 (none = for tables alone)"
    )

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Refuse: own data are given by their path, and not by this name."""
        raise DataError(f"--data: own is not a data set by itself; give {FORMS}")

    def read(
        self, given: Table | Arrays | None, settings: DataSettings, task: str | None
    ) -> Dataset:
        """Return the data that the settings name, or those that are `given` from Python.

        `task` decides how targets are understood. Raises `DataError` or `OptionError`.
        """
        if settings.data_dir or settings.download:
            flag = "--data-dir" if settings.data_dir else "--download"
            raise OptionError(f"{flag} has no effect on {settings.data}; leave it out")
        found = given or _open(settings)
        if isinstance(found, Table):
            return self._of_table(found, settings, task)
        for flag in TABLE_FLAGS:
            if getattr(settings, flag):
                raise OptionError(
                    f"--{flag} names a column of a table, but {found.name} has arrays; leave it out"
                )
        return _of_arrays(found, task=task, standardise=bool(self.standardise))

    def _of_table(self, table: Table, settings: DataSettings, task: str | None) -> Dataset:
        target, client = settings.target, settings.client
        if not target:
            raise OptionError(
                f"--target is missing: the column to predict; {table.name} has "
                f"{', '.join(table.columns)}"
            )
        folder = FOLDER_OWNER in table.columns
        if folder and client:
            raise OptionError(
                "--client: in a folder, the names of the files are the owners; leave it out, or "
                "give one file with a column of owners"
            )
        for name in settings.drop:
            table.column(name, "--drop")
        targets = targets_of(
            table.column(target, "--target"), table.name, f"column {target}", task, table=True
        )
        column = FOLDER_OWNER if folder else client
        owner, ids = None, tuple[int | str, ...]()
        if column:
            values = table.column(column, "--client")
            owner, ids = owners_of(values, table.name, f"column {column}")
        beside = [*([column] if column else []), *settings.drop]
        schema, notes = Schema.infer(table, target, beside)
        codes = schema.codes(table)
        standardise = self.standardise is not False
        if not standardise and (gaps := np.isnan(codes).any(0)).any():
            raise DataError(
                f"dataset.standardise: column {schema.columns[int(gaps.argmax())].name} of "
                f"{table.name} has missing values, which means of training samples replace; leave "
                "the option out, or fill them in"
            )
        return Dataset(
            Path(table.name).stem,
            targets.task,
            codes,
            targets.y,
            targets.classes,
            owner,
            standardise=standardise,
            class_names=targets.names,
            owners=ids,
            schema=schema,
            notes=(targets.note, *notes),
        )


def is_own(text: str) -> bool:
    """Return whether ``--data`` names a file, a folder or data from Python, by its form."""
    separators = {"/", os.sep}
    return (
        Path(text).suffix.lower() in {".npz", *SUFFIXES}
        or text == MEMORY
        or any(separator in text for separator in separators)
        or _is_folder(text)
    )


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # a name that no file can have
        return False


def load_npz(
    path: Path, classes: int = 0, task: str | None = None, *, gaps: bool = False
) -> Dataset:
    """Load ``x``, ``y``, optionally ``client`` (owner of each sample) and ``x_test``, ``y_test``.

    ``client_test`` holds the owners of the test samples, where they are known. ``y`` is understood
    as `targets_of` says; if the number of `classes` is given, it is labels 0..C-1 of which some may
    be missing. Bytes in ``x`` are scaled to [0, 1]; with `gaps`, NaN is a missing value. Raises
    `DataError` naming the array that is wrong.
    """
    return _of_arrays(_read(path), task=task, classes=classes, gaps=gaps)


def load_rows(path: Path, schema: Schema, task: str, classes: tuple[str, ...]) -> Dataset:
    """Load a table as the `schema` of other owners' tables says, with the names of its `classes`.

    Raises `DataError` if a column or a class differs.
    """
    table = read_table(path)
    x, notes = schema.read(table)
    values = table.column(schema.target, "the target")
    gaps = missing(values)
    if task == "regression":
        targets = targets_of(values, table.name, f"column {schema.target}", task, table=True)
        return Dataset(path.stem, "regression", x, targets.y, notes=notes)
    number = {name: label for label, name in enumerate(classes)}
    names = texts(values, gaps)
    if odd := sorted(set(names) - number.keys()):
        raise DataError(
            f"{path}: column {schema.target} has {odd[0]!r}; allowed: {', '.join(classes)}"
        )
    y = np.array([number[name] for name in names], np.int64)
    return Dataset(path.stem, "classification", x, y, len(classes), notes=notes)


def _open(settings: DataSettings) -> Table | Arrays:
    """Read the file or the folder that the settings name."""
    path = Path(settings.data)
    if settings.data == MEMORY:
        raise DataError(
            "--data: the data of this run were given from Python and are not kept; continue with "
            "bflcore.resume(RUN, data=...) and the same data"
        )
    if path.is_dir():
        return read_folder(path, FOLDER_OWNER)
    if path.suffix.lower() in SUFFIXES:
        return read_table(path)
    return _read(path)


def _of_arrays(
    given: Arrays,
    *,
    task: str | None = None,
    classes: int = 0,
    standardise: bool = False,
    gaps: bool = False,
) -> Dataset:
    where, arrays = given.name, dict(given.arrays)
    for name in arrays:
        if name not in ALLOWED:
            raise DataError(f"{where}: array {name!r} is unknown; allowed: {', '.join(ALLOWED)}")
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{where}: array {name!r} is missing; it needs x and y")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{where}: one of x_test and y_test is missing; give both or neither")
    if "client_test" in arrays and not {"client", "x_test"} <= arrays.keys():
        raise DataError(f"{where}: client_test needs client and x_test; give all three")
    for name, array in arrays.items():
        _check_array(where, name, array, gaps=gaps or standardise)
    _check_lengths(where, arrays, "x", ("y", "client"))
    if "x_test" in arrays:
        _check_lengths(where, arrays, "x_test", ("y_test", "client_test"))
        _check_alike(where, arrays)
    return _dataset(where, arrays, task, classes, standardise=standardise)


def _dataset(
    where: str,
    arrays: dict[str, Any],
    task: str | None,
    classes: int,
    *,
    standardise: bool,
) -> Dataset:
    test = "x_test" in arrays
    count = len(arrays["y"])
    both = [arrays["y"], arrays["y_test"]] if test else [arrays["y"]]
    targets = _known(where, np.concatenate(both), classes) if classes else None
    targets = targets or targets_of(np.concatenate(both), where, "y", task)
    owner, ids = None, tuple[int | str, ...]()
    if "client" in arrays:
        owned = [arrays[name] for name in ("client", "client_test") if name in arrays]
        owner, ids = owners_of(np.concatenate(owned), where, "client")
    x, schema = arrays["x"], None
    if standardise and x.ndim == 2 and x.dtype != np.uint8:  # as a table of numbers
        schema = Schema(tuple(Column(f"x[{place}]", NUMBER) for place in range(x.shape[1])))
    inputs = _inputs if schema is None else _codes
    default = targets.names == tuple(map(str, range(targets.classes)))
    return Dataset(
        Path(where).stem,
        targets.task,
        inputs(x),
        targets.y[:count],
        targets.classes,
        None if owner is None else owner[:count],
        inputs(arrays["x_test"]) if test else None,
        targets.y[count:] if test else None,
        owner[count:] if owner is not None and "client_test" in arrays else None,
        standardise=standardise,
        unit=255.0 if x.dtype == np.uint8 else 1.0,
        class_names=() if default else targets.names,
        owners=ids,
        schema=schema,
        notes=(targets.note,) if targets.note else (),
    )


def _known(where: str, labels: Any, classes: int) -> Targets:
    """Return labels 0..C-1 of known classes, some of which may be missing."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(
            f"{where}: y has shape {labels.shape} and type {labels.dtype}; allowed: one label, 0 "
            f"to {classes - 1}, per sample"
        )
    if labels.min() < 0 or labels.max() >= classes:
        odd = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{where}: y has label {odd}; allowed: 0 to {classes - 1}")
    return Targets("classification", labels.astype(np.int64), classes)


def _read(path: Path) -> Arrays:
    check_unpacked(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return Arrays({name: file[name] for name in file.files}, str(path))
    except FileNotFoundError:
        raise DataError(f"--data: {path} does not exist; give {FORMS}") from None
    except UNREADABLE as error:
        raise DataError(
            f"--data: {path} cannot be read as .npz ({error}); write it with numpy.savez, "
            "without object arrays"
        ) from None


def _check_array(where: str, name: str, array: Any, *, gaps: bool) -> None:
    if not isinstance(array, np.ndarray):  # a member of the archive that is not an array
        raise DataError(f"{where}: {name} is not an array; write the file with numpy.savez")
    if array.ndim == 0 or array.size == 0:
        raise DataError(f"{where}: {name} is empty")
    if not name.startswith("x"):
        return
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{where}: {name} has type {array.dtype}; allowed: numbers; features of other types "
            "come as a table, with --target"
        )
    if array.dtype.kind != "f":
        return
    fits = np.abs(array) <= np.finfo(np.float32).max  # false for NaN, too
    if gaps and array.ndim == 2:
        fits |= np.isnan(array)
    if not fits.all():
        row = int(np.argwhere(~fits.reshape(len(array), -1).all(1))[0, 0])
        step = "remove it"
        if array.ndim == 2 and not gaps:
            step = "-o dataset.standardise=true puts means in place of NaN; or remove it"
        raise DataError(
            f"{where}: {name} has NaN, infinity or more than float32 holds (first at sample "
            f"{row}); {step}"
        )


def _check_lengths(where: str, arrays: dict[str, Any], first: str, others: tuple[str, ...]) -> None:
    for other in others:
        if other in arrays and len(arrays[other]) != len(arrays[first]):
            raise DataError(
                f"{where}: {first} has {len(arrays[first])} samples, {other} has "
                f"{len(arrays[other])}; both must be the same"
            )


def _check_alike(where: str, arrays: dict[str, Any]) -> None:
    """Refuse a test split whose samples are not of the same kind as the training samples."""
    for name in ("x", "y"):
        mine, test = arrays[name], arrays[f"{name}_test"]
        if mine.shape[1:] != test.shape[1:]:
            raise DataError(
                f"{where}: samples of {name} have shape {mine.shape[1:]}, those of {name}_test "
                f"{test.shape[1:]}; both must be the same"
            )
        # Bytes are scaled, other numbers are not; integers are labels, real numbers are targets.
        one, other = (
            array.dtype == np.uint8 if name == "x" else array.dtype.kind == "f"
            for array in (mine, test)
        )
        if one != other:
            raise DataError(
                f"{where}: {name} has type {mine.dtype}, {name}_test has {test.dtype}; "
                "give both the same type"
            )


def _inputs(x: Any) -> Any:
    scaled = x.astype(np.float32)
    scaled = scaled[:, None] if scaled.ndim == 1 else scaled
    return scaled / np.float32(255) if x.dtype == np.uint8 else scaled


def _codes(x: Any) -> Any:
    return x.astype(np.float64)
