"""Samples as users have them."""

import numpy as np
import pytest
import torch

import bflcore
from bflcore.api.inputs import read_samples, samples, targets
from bflcore.data.schema import Column, Schema
from bflcore.experiments.description import Client, Description


def described(**given):
    values = {
        "task": "classification",
        "shape": (2,),
        "byte": None,
        "input_range": "0,1",
        "standardise": False,
        "outputs": 3,
        "classes": ("mild", "severe", "none"),
        "clients": (Client(0, 1),),
    }
    return Description(**values | given)


@pytest.mark.parametrize(
    "x", [[[1, 2]], np.array([[1, 2]]), np.array([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]])]
)
def test_numbers_of_any_type_become_float32(x):
    assert torch.equal(samples(x, described()), torch.tensor([[1.0, 2.0]]))


def test_bytes_are_scaled_as_the_training_data_were():
    pixels = np.array([[0, 255]], np.uint8)
    assert samples(pixels, described(byte=255.0)).tolist() == [[0, 1]]
    assert samples(pixels, described(byte=255.0, input_range="-1,1")).tolist() == [[-1, 1]]
    assert samples(pixels, described(byte=1.0)).tolist() == [[0, 255]]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(2), r"shape \[2\], but.*samples have shape \[2\]; give one sample as x\[None\]"),
        (np.zeros((4, 3)), r"x has shape \[4, 3\], but the model's samples have shape \[2\]"),
        (np.array([["a", "b"]]), "x has type <U1; allowed: numbers"),
        (np.array([[1, np.nan]]), "x has NaN, infinity"),
        (np.zeros((1, 2), np.uint8), "x has type uint8, but the model was trained on real numbers"),
        (np.float32(1), r"x has shape \[\]"),
    ],
)
def test_other_samples_are_refused_in_one_line(x, message):
    with pytest.raises(bflcore.DataError, match=message):
        samples(x, described())


TABLE = Schema((Column("age", "number", (), True), Column("sex", "category", ("f", "m"))), "y")


def tabular(**given):
    return described(shape=(4,), schema=TABLE, standardise=True, **given)


def test_rows_of_a_table_are_encoded_by_name():
    pandas = pytest.importorskip("pandas")
    rows = [{"sex": "m", "age": 61}, {"sex": "f"}]
    expected = [[61, 0, 0, 1], [np.nan, 1, 1, 0]]
    columns = {"sex": ["m", "f"], "age": [61, None]}
    for form in (rows, columns, pandas.DataFrame(rows)):
        np.testing.assert_array_equal(samples(form, tabular()), expected)


def test_what_is_ignored_in_rows_is_a_warning():
    with pytest.warns(UserWarning, match="no training sample has x; such values count as none"):
        samples([{"sex": "x", "age": 1}], tabular())


def test_rows_without_names_are_numbers_by_position():
    numbers = Schema((Column("age", "number"), Column("bmi", "number")))
    of = described(schema=numbers, standardise=True)
    np.testing.assert_array_equal(samples([[1, np.nan]], of), [[1, np.nan]])
    with pytest.raises(bflcore.DataError, match=r"shape \[1, 3\], but .* columns age, bmi; give"):
        samples([[1, 2, 3]], of)
    with pytest.raises(bflcore.DataError, match="x has infinity"):
        samples([[1, np.inf]], of)


def test_without_standardisation_nothing_replaces_missing_values():
    numbers = Schema((Column("age", "number"),))
    with pytest.raises(bflcore.DataError, match="x has missing values, but the model was trained"):
        samples([{"age": None}], described(shape=(1,), schema=numbers))


def test_a_file_for_a_run_on_a_table_is_read_with_names(tmp_path):
    (tmp_path / "new.csv").write_text("sex,age\nf,\n")
    read = read_samples(tmp_path / "new.csv", (4,), TABLE)
    np.testing.assert_array_equal(samples(read, tabular()), [[np.nan, 1, 1, 0]])


def test_labels_are_numbers_or_names():
    assert targets([0, 2], described(), 2).tolist() == [0, 2]
    assert targets(["none", "mild"], described(), 2).tolist() == [2, 0]
    # Numbers that are names are not numbers of classes.
    assert targets([5, 1], described(classes=("1", "3", "5")), 2).tolist() == [2, 0]
    with pytest.raises(bflcore.DataError, match="allowed: mild, severe, none"):
        targets(["unknown", "mild"], described(), 2)
    with pytest.raises(bflcore.DataError, match="other labels"):
        targets([[0, 1]], described(), 1)


def test_real_targets_have_as_many_columns_as_the_run():
    regression = described(task="regression", outputs=1, classes=())
    assert targets([1, 2.5], regression, 2).tolist() == [[1], [2.5]]
    with pytest.raises(bflcore.DataError, match="allowed: numbers, 1 per sample"):
        targets([[1, 2]], regression, 1)


def test_a_table_is_read_with_and_without_names(tmp_path):
    path = tmp_path / "x.csv"
    for text in ("a,b\n1,2\n3,4\n", "1,2\n3,4\n", "1,2\n3,4"):
        path.write_text(text)
        assert read_samples(path, (2,)).tolist() == [[1, 2], [3, 4]]
    path.write_text("1,2\n")
    assert read_samples(path, (2,)).tolist() == [[1, 2]]
    path.write_text("1,2,3,4\n")
    assert read_samples(path, (1, 2, 2)).shape == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "", "x.csv has no samples"),
        ("x.csv", "a,b\n", "x.csv has no samples"),
        ("x.csv", "1,2,3\n", "x.csv has 3 columns, but the model's samples have 2 values"),
        ("x.csv", "1,2\n1,b\n", "x.csv cannot be read"),
        ("x.npz", "text", "x.npz cannot be read"),
        ("x.txt", "1,2\n", "x.txt cannot be read; allowed: an .npz file with x, or a .csv"),
        ("absent.csv", None, "absent.csv cannot be read"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(bflcore.DataError, match=message) as error:
        read_samples(path, (2,))
    assert "\n" not in str(error.value)


def test_a_file_without_x_says_what_it_has(tmp_path):
    np.savez(tmp_path / "x.npz", features=np.zeros((1, 2)))
    with pytest.raises(bflcore.DataError, match="array 'x' is missing; the file has features"):
        read_samples(tmp_path / "x.npz", (2,))
