"""What a data set is, and where one comes from."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from bflcore.errors import OptionError
from bflcore.lazy import lazy
from bflcore.options import Component

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from bflcore.data.schema import Schema

    Floats = npt.NDArray[np.float32]
    Integers = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
else:
    np = lazy("numpy")
    Floats = Integers = Bytes = Any  # annotations alone use them

__all__ = ["DataSource", "Dataset", "centred", "encoded"]


@attrs.frozen(eq=False)
class Dataset:
    """A data set in memory, before it is divided among clients.

    `x` is ``[N, ...]`` float32 (images ``[N, C, H, W]`` in [0, 1]; tables ``[N, F]``; character
    codes ``[N, T]``), or uint8 to be divided by `unit` once used, which takes a quarter of the
    memory. `y` is ``[N]`` int64 class labels in ``0..classes-1``, or ``[N, T]`` float32 regression
    targets. `client` ``[N]`` int64, where the data has natural owners. A *held-out* test split
    (`x_test`, `y_test`, and `client_test` where its samples have owners, too) is never trained
    on; data sets whose split is a convention of
    benchmarks (MNIST and its like) arrive pooled in `x` and `y`, and each client's share is
    divided into training and test samples instead, as the personalisation papers do. `unit` also
    says how bytes that are predicted later are scaled.
    """

    name: str
    task: Literal["classification", "regression"]
    x: Floats | Bytes
    y: npt.NDArray[np.int64] | Floats
    classes: int = 0
    client: Integers | None = None
    x_test: Floats | Bytes | None = None
    y_test: npt.NDArray[np.int64] | Floats | None = None
    client_test: Integers | None = None  # owners of the held-out test samples
    standardise: bool = False  # scale features and targets by sums over the clients (`Scaling`)
    unit: float = 1.0  # the byte that stands for 1: 255 for pixels, 1 for characters
    class_names: tuple[str, ...] = ()  # by label; without them, the labels are the names
    owners: tuple[int | str, ...] = ()  # ids by the numbers in `client`, if those are not the ids
    schema: Schema | None = None  # of a table, whose rows `x` are `Schema.codes` until `encoded`
    notes: tuple[str, ...] = ()  # what a user should know of how the data were understood

    @property
    def outputs(self) -> int:
        """Number of outputs a model needs: classes, or regression targets."""
        return self.classes if self.task == "classification" else int(self.y.shape[1])

    def owner(self, number: int) -> int | str:
        """Return the id of an owner by its number in `client`."""
        return self.owners[number] if self.owners else number

    def scaled(self, x: Tensor) -> Tensor:
        """Return samples ``[N, ...]`` of `x` as real numbers: bytes in units of `unit`."""
        return x if x.is_floating_point() else x / self.unit


def centred(dataset: Dataset) -> Dataset:
    """Scale images from [0, 1] to [-1, 1].

    Raises `OptionError` for other inputs: samples without height and width, or values outside
    [0, 1].
    """
    given = [dataset.x] if dataset.x_test is None else [dataset.x, dataset.x_test]
    arrays = [x if x.dtype.kind == "f" else x / np.float32(dataset.unit) for x in given]
    low, high = min(float(x.min()) for x in arrays), max(float(x.max()) for x in arrays)
    if dataset.x.ndim != 4 or low < 0 or high > 1:
        raise OptionError(
            f"--input-range: -1,1 is for images with values in [0, 1], but {dataset.name} has "
            f"samples of shape {list(dataset.x.shape[1:])} with values from {low:.3g} to "
            f"{high:.3g}; allowed here: 0,1, which leaves them as they are"
        )
    x, *held_out = (np.asarray(2 * x - 1, np.float32) for x in arrays)
    return attrs.evolve(dataset, x=x, x_test=held_out[0] if held_out else None)


def encoded(dataset: Dataset, train: Integers, *, references: bool = False) -> Dataset:
    """Turn the codes of a table's rows into features; `train` are the training samples in `x`.

    Columns, categories and indicators of missing values are those of the training samples. With
    `references`, the first category of each column has no feature.
    """
    if dataset.schema is None:
        return dataset
    tests = [] if dataset.x_test is None else [dataset.x_test]
    schema, codes = dataset.schema.of_training(dataset.x, train, *tests)
    if references:
        columns = tuple(column.with_reference() for column in schema.columns)
        schema = attrs.evolve(schema, columns=columns)
    x, *held_out = map(schema.encode, codes)
    return attrs.evolve(dataset, schema=schema, x=x, x_test=held_out[0] if held_out else None)


class DataSource(Component, abc.ABC):
    """Base of data sets that ``--data NAME`` finds.

    `public` says that anybody may see the samples: a run then keeps a few test samples for its
    report (``--keep-samples``).
    """

    kind: ClassVar[str] = "dataset"
    public: ClassVar[bool] = False

    @abc.abstractmethod
    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load the data set.

        `folder` is ``--data-dir``; `download` permits fetching what is not there. Raises
        `DataError` saying which command gets the data when it is absent.
        """
