import zipfile

import numpy as np
import pytest

from bflcore import DataError
from bflcore.data.user import load_npz


def save(tmp_path, **arrays):
    np.savez(tmp_path / "own.npz", **arrays)
    return tmp_path / "own.npz"


X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])


def test_integer_targets_make_a_classification(tmp_path):
    data = load_npz(save(tmp_path, x=X, y=Y, client=Y, x_test=X[:2], y_test=np.array([3, 0])))
    assert (data.task, data.classes, data.outputs) == ("classification", 4, 4)
    assert data.x.dtype == np.float32
    assert data.y_test.tolist() == [3, 0]
    assert data.client.tolist() == Y.tolist()


def test_real_targets_make_a_regression(tmp_path):
    data = load_npz(save(tmp_path, x=X, y=Y + 0.5))
    assert (data.task, data.y.shape, data.outputs) == ("regression", (6, 1), 1)


def test_bytes_are_scaled_to_the_unit_interval(tmp_path):
    data = load_npz(save(tmp_path, x=np.full((2, 4), 255, np.uint8), y=np.array([0, 1])))
    assert (data.x == 1).all()


NAN = X.copy()
NAN[4, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "'y' is missing"),
        ({"x": X, "y": Y[:5]}, "x has 6 samples, y has 5"),
        ({"x": NAN, "y": Y}, r"x has NaN, infinity .* \(first at sample 4\)"),
        ({"x": X * 1e300, "y": Y}, r"more than float32 holds \(first at sample 0\)"),
        ({"x": X, "y": Y * 2}, "goes up to 4 but has no label 1"),
        ({"x": X, "y": Y - 1}, "label -1; allowed: 0..C-1"),
        ({"x": X, "y": np.zeros(6, int)}, "a single class"),
        ({"x": X, "y": Y, "client": Y[:3]}, "client has 3"),
        ({"x": X, "y": Y, "client": Y / 2}, "client must be a vector of integers"),
        ({"x": X, "y": Y, "x_test": X}, "one of x_test and y_test is missing"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, "both must be the same"),
        (
            {"x": X, "y": X, "x_test": X, "y_test": X[:, :1]},
            "samples of y .* must be the same",
        ),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y / 2}, "y has type int64, y_test has float64"),
        ({"x": X.astype("u1"), "y": Y, "x_test": X, "y_test": Y}, "x has type uint8, x_test"),
        ({"x": X[:0], "y": Y[:0]}, "x is empty"),
        ({"x": X[:, :0], "y": Y}, "x is empty"),
        ({"x": np.float64(1), "y": Y}, "x is empty"),
        ({"x": X.astype(str), "y": Y}, "allowed: numbers"),
        ({"x": X, "y": Y, "labels": Y}, "'labels' is unknown"),
    ],
)
def test_malformed_arrays_are_named(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        load_npz(save(tmp_path, **arrays))


def test_pickles_are_never_loaded(tmp_path):
    path = save(tmp_path, x=np.array([{"evil": 1}], dtype=object), y=np.array([1]))
    with pytest.raises(DataError, match="without object arrays"):
        load_npz(path)


def test_files_that_are_no_npz_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_npz(tmp_path / "none.npz")
    (tmp_path / "own.npz").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        load_npz(tmp_path / "own.npz")


def test_a_damaged_archive_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "own.npz", x=np.random.default_rng(0).normal(size=(500, 4)))
    raw = bytearray((tmp_path / "own.npz").read_bytes())
    raw[100:140] = b"\xff" * 40  # inside the compressed numbers
    (tmp_path / "own.npz").write_bytes(raw)
    with pytest.raises(DataError, match="cannot be read"):
        load_npz(tmp_path / "own.npz")


def test_a_member_that_is_no_array_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x", b"hello")
        archive.writestr("y", b"hello")
    with pytest.raises(DataError, match="x is not an array"):
        load_npz(tmp_path / "own.npz")


def test_owners_of_test_samples_come_with_owners_of_samples(tmp_path):
    test = {"x_test": X[:2], "y_test": np.array([1, 0]), "client_test": np.array([2, 0])}
    data = load_npz(save(tmp_path, x=X, y=Y, client=Y, **test))
    assert data.client_test.tolist() == [2, 0]
    with pytest.raises(DataError, match="client_test needs client and x_test"):
        load_npz(save(tmp_path, x=X, y=Y, **test))
    with pytest.raises(DataError, match="x_test has 2 samples, client_test has 1"):
        load_npz(save(tmp_path, x=X, y=Y, client=Y, **test | {"client_test": np.array([2])}))
    with pytest.raises(DataError, match="client_test must be a vector of integers"):
        load_npz(save(tmp_path, x=X, y=Y, client=Y, **test | {"client_test": np.array([0.5, 1])}))
