"""What a data set is, and where one comes from."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from bflcore.lazy import lazy
from bflcore.options import Component

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Integers = npt.NDArray[np.int64]
else:
    np = lazy("numpy")
    Floats = Integers = Any  # annotations alone use them

__all__ = ["DataSource", "Dataset"]


@attrs.frozen(eq=False)
class Dataset:
    """A data set in memory, before it is divided among clients.

    `x` is ``[N, ...]`` float32 (images ``[N, C, H, W]`` in [0, 1]; tables ``[N, F]``). `y` is
    ``[N]`` int64 class labels in ``0..classes-1``, or ``[N, T]`` float32 regression targets.
    `client` ``[N]`` int64, where the data has natural owners. A *held-out* test split
    (`x_test`, `y_test`) is never trained on; data sets whose split is a convention of
    benchmarks (MNIST and its like) arrive pooled in `x` and `y`, and each client's share is
    divided into training and test samples instead, as the personalisation papers do.
    """

    name: str
    task: Literal["classification", "regression"]
    x: Floats
    y: npt.NDArray[np.int64] | Floats
    classes: int = 0
    client: Integers | None = None
    x_test: Floats | None = None
    y_test: npt.NDArray[np.int64] | Floats | None = None
    standardise: bool = False  # scale features and targets by sums over the clients (`Scaling`)

    @property
    def outputs(self) -> int:
        """Number of outputs a model needs: classes, or regression targets."""
        return self.classes if self.task == "classification" else int(self.y.shape[1])


class DataSource(Component, abc.ABC):
    """Base of data sets that ``--data NAME`` finds."""

    kind: ClassVar[str] = "dataset"

    @abc.abstractmethod
    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load the data set.

        `folder` is ``--data-dir``; `download` permits fetching what is not there. Raises
        `DataError` saying which command gets the data when it is absent.
        """
