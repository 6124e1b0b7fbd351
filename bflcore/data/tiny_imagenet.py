"""Tiny ImageNet, read from its official folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.data.base import Dataset, DataSource
from bflcore.errors import DataError
from bflcore.lazy import lazy
from bflcore.options import component

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["TinyImageNet"]

SIDE = 64  # pixels
FOLDER = "tiny-imagenet-200"
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


@component
class TinyImageNet(DataSource):
    """110,000 colour images, 64x64, 200 classes (training and validation images pooled).

    Classes are numbered in the order of ``wnids.txt``. The official test images have no published
    labels and are left out. Images stay bytes until they are used: 1.3 GB in all.
    """

    name = "tiny-imagenet"
    reference = "Le and Yang 2015"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Read ``wnids.txt``, ``train`` and ``val`` in `folder` or in its ``tiny-imagenet-200``."""
        roots = [] if folder is None else [folder, folder / FOLDER]
        root = next((root for root in roots if (root / "wnids.txt").is_file()), None)
        if root is None:
            where = "--data-dir is not given" if folder is None else f"not in {folder}"
            raise DataError(
                f"{self.name}: {where}; to get it: curl -O {URL} && unzip {FOLDER}.zip, "
                f"then give the folder {FOLDER} with --data-dir"
            )
        names = (root / "wnids.txt").read_text(encoding="utf-8").split()
        classes = {name: number for number, name in enumerate(names)}
        listed = [*_training(root, classes), *_validation(root, classes)]
        x = np.empty((len(listed), 3, SIDE, SIDE), np.uint8)
        read = _reader()
        for row, (path, _) in enumerate(listed):
            x[row] = read(path)
        y = np.array([label for _, label in listed], np.int64)
        return Dataset(self.name, "classification", x, y, len(classes), unit=255.0)


def _training(root: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    """Return the training images with their classes. Raises `DataError` for a class without any."""
    listed = []
    for name, label in classes.items():
        images = sorted((root / "train" / name / "images").glob("*.JPEG"))
        if not images:
            raise DataError(
                f"{root / 'train' / name / 'images'} has no *.JPEG, but wnids.txt lists the class; "
                f"unpack {FOLDER}.zip again"
            )
        listed += [(path, label) for path in images]
    return listed


def _validation(root: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    """Return the validation images with their classes, as ``val_annotations.txt`` lists them."""
    table = root / "val" / "val_annotations.txt"
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{table} cannot be read: {error}; unpack {FOLDER}.zip again") from None
    listed = []
    for number, line in enumerate(lines, 1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in classes:
            raise DataError(
                f"{table}, line {number}: expected a file name, a tab and a class of wnids.txt, "
                f"got {line[:40]!r}; unpack {FOLDER}.zip again"
            )
        listed.append((root / "val" / "images" / name, classes[wnid]))
    return listed


def _reader() -> Any:
    """Return a function from a path to the image's bytes ``[3, 64, 64]``."""
    try:
        image = importlib.import_module("PIL.Image")
    except ModuleNotFoundError:
        raise DataError("pillow is not installed: pip install 'bflcore[data]'") from None

    def read(path: Path) -> Any:
        try:
            with image.open(path) as file:
                pixels = np.asarray(file.convert("RGB"))  # some images are grey
        except (OSError, SyntaxError, ValueError) as error:  # what pillow raises for damaged files
            raise DataError(f"{path} cannot be read: {error}; unpack {FOLDER}.zip again") from None
        if pixels.shape != (SIDE, SIDE, 3):
            raise DataError(
                f"{path} has {pixels.shape[1]}x{pixels.shape[0]} pixels, not {SIDE}x{SIDE}; "
                f"unpack {FOLDER}.zip again"
            )
        return pixels.transpose(2, 0, 1)

    return read
