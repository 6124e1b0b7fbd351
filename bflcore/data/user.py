"""A user's own data: ``--data path/to/data.npz``."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.data.base import Dataset
from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["load_npz"]

ALLOWED = ("x", "y", "client", "x_test", "y_test", "client_test")

# What numpy and zipfile raise for files that are damaged, encrypted, or not an archive.
UNREADABLE = (
    OSError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    AttributeError,
    TypeError,
    RuntimeError,
)


def load_npz(path: Path, classes: int = 0) -> Dataset:
    """Load ``x``, ``y``, optionally ``client`` (owner of each sample) and ``x_test``, ``y_test``.

    ``client_test`` holds the owners of the test samples, where they are known.

    Integer ``y`` are class labels 0..C-1, each of which occurs in ``y`` or ``y_test`` unless the
    number of `classes` is given; real ``y`` are regression targets ``[N]`` or ``[N, T]``.
    Bytes in ``x`` are scaled to [0, 1]. Raises `DataError` naming the array that is wrong.
    """
    arrays = _read(path)
    for name in arrays:
        if name not in ALLOWED:
            raise DataError(f"{path}: array {name!r} is unknown; allowed: {', '.join(ALLOWED)}")
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{path}: array {name!r} is missing; it needs x and y")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path}: one of x_test and y_test is missing; give both or neither")
    if "client_test" in arrays and not {"client", "x_test"} <= arrays.keys():
        raise DataError(f"{path}: client_test needs client and x_test; give all three")
    for name, array in arrays.items():
        _check_numbers(path, name, array)
    _check_lengths(path, arrays, "x", ("y", "client"))
    if "x_test" in arrays:
        _check_lengths(path, arrays, "x_test", ("y_test", "client_test"))
        _check_alike(path, arrays)
    return _dataset(path, arrays, classes)


def _dataset(path: Path, arrays: dict[str, Any], classes: int) -> Dataset:
    labels = arrays["y"].dtype.kind in "iub"
    targets = _labels if labels else _targets
    test = "x_test" in arrays
    y = targets(path, "y", arrays["y"])
    y_test = targets(path, "y_test", arrays["y_test"]) if test else None
    if labels:
        classes = _classes(path, y if y_test is None else np.concatenate([y, y_test]), classes)
    return Dataset(
        path.stem,
        "classification" if labels else "regression",
        _inputs(arrays["x"]),
        y,
        classes,
        arrays["client"].astype(np.int64) if "client" in arrays else None,
        _inputs(arrays["x_test"]) if test else None,
        y_test,
        arrays["client_test"].astype(np.int64) if "client_test" in arrays else None,
        unit=255.0 if arrays["x"].dtype == np.uint8 else 1.0,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise DataError(f"--data: {path} does not exist; give an .npz file with x and y") from None
    except UNREADABLE as error:
        raise DataError(
            f"--data: {path} cannot be read as .npz ({error}); write it with numpy.savez, "
            "without object arrays"
        ) from None


def _check_numbers(path: Path, name: str, array: Any) -> None:
    if not isinstance(array, np.ndarray):  # a member of the archive that is not an array
        raise DataError(f"{path}: {name} is not an array; write the file with numpy.savez")
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path}: {name} has type {array.dtype}; allowed: numbers")
    if name.startswith("client") and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise DataError(f"{path}: {name} must be a vector of integers, one owner per sample")
    if array.ndim == 0 or array.size == 0:
        raise DataError(f"{path}: {name} is empty")
    if array.dtype.kind != "f":
        return
    fits = np.abs(array) <= np.finfo(np.float32).max  # false for NaN, too
    if not fits.all():
        row = int(np.argwhere(~fits.reshape(len(array), -1).all(1))[0, 0])
        raise DataError(
            f"{path}: {name} has NaN, infinity or more than float32 holds (first at sample {row}); "
            "remove it"
        )


def _check_lengths(path: Path, arrays: dict[str, Any], first: str, others: tuple[str, ...]) -> None:
    for other in others:
        if other in arrays and len(arrays[other]) != len(arrays[first]):
            raise DataError(
                f"{path}: {first} has {len(arrays[first])} samples, {other} has "
                f"{len(arrays[other])}; both must be the same"
            )


def _check_alike(path: Path, arrays: dict[str, Any]) -> None:
    """Refuse a test split whose samples are not of the same kind as the training samples."""
    for name in ("x", "y"):
        mine, test = arrays[name], arrays[f"{name}_test"]
        if mine.shape[1:] != test.shape[1:]:
            raise DataError(
                f"{path}: samples of {name} have shape {mine.shape[1:]}, those of {name}_test "
                f"{test.shape[1:]}; both must be the same"
            )
        # Bytes are scaled, other numbers are not; integers are labels, real numbers are targets.
        one, other = (
            array.dtype == np.uint8 if name == "x" else array.dtype.kind == "f"
            for array in (mine, test)
        )
        if one != other:
            raise DataError(
                f"{path}: {name} has type {mine.dtype}, {name}_test has {test.dtype}; "
                "give both the same type"
            )


def _inputs(x: Any) -> Any:
    scaled = x.astype(np.float32)
    scaled = scaled[:, None] if scaled.ndim == 1 else scaled
    return scaled / np.float32(255) if x.dtype == np.uint8 else scaled


def _labels(path: Path, name: str, y: Any) -> Any:
    if y.ndim != 1:
        raise DataError(
            f"{path}: integer {name} has shape {y.shape}; allowed: one label per sample"
        )
    if y.min() < 0:
        raise DataError(f"{path}: {name} has the label {y.min()}; allowed: 0..C-1")
    return y.astype(np.int64)


def _classes(path: Path, labels: Any, known: int) -> int:
    """Return C. Raises `DataError` unless the labels are exactly 0..C-1 and C >= 2.

    Where C is known, some of the labels may be missing.
    """
    present = np.unique(labels)
    classes = int(present[-1]) + 1
    if known and classes > known:
        raise DataError(f"{path}: y has label {classes - 1}; allowed: 0 to {known - 1}")
    if known:
        return known
    if classes < 2:
        raise DataError(f"{path}: y has a single class; allowed: labels 0..C-1 with C >= 2")
    if len(present) < classes:
        missing = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise DataError(
            f"{path}: y goes up to {classes - 1} but has no label {missing}; allowed: labels "
            "0..C-1 without gaps: renumber them with numpy.unique(y, return_inverse=True)[1]"
        )
    return classes


def _targets(path: Path, name: str, y: Any) -> Any:
    if y.ndim > 2:
        raise DataError(f"{path}: {name} has shape {y.shape}; allowed: [N] or [N, targets]")
    return y.astype(np.float32).reshape(len(y), -1)
