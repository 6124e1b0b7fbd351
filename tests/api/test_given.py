"""Data that Python holds, in every form, are the data of the same run."""

import types

import numpy as np
import pytest
import torch

import bflcore
from bflcore.api.given import as_table, own_data
from bflcore.data.tables import Table
from bflcore.data.user import Arrays

X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = np.arange(12) % 3
OWNER = np.repeat(["ukb", "lmu"], 6)
FLAGS = {"rounds": 2, "data": "memory"}
COLUMNS = {"age": [61, None, 30], "sex": ["f", "m", None], "outcome": [0, 1, 1]}


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        ({"x": X, "y": Y, "client": OWNER}, {}),
        ((X, Y, OWNER), {}),
        ((X, Y), {"client": OWNER}),
        (X, {"target": Y, "client": OWNER}),
        (torch.as_tensor(X), {"target": torch.as_tensor(Y), "client": OWNER}),
        (torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y)), {"client": OWNER}),
        ([(x, y, owner) for x, y, owner in zip(X, Y, OWNER, strict=True)], {}),
    ],
)
def test_arrays_in_every_form_are_the_same_arrays(data, flags):
    found, left = own_data(data, flags | FLAGS)
    assert isinstance(found, Arrays)
    assert left == FLAGS
    for name, expected in (("x", X), ("y", Y), ("client", OWNER)):
        np.testing.assert_array_equal(found.arrays[name], expected)


class Frames:
    """Stands in for a Hugging Face data set: columns, and features that name labels."""

    column_names = tuple(COLUMNS)

    def __init__(self):
        labels = types.SimpleNamespace(int2str=["mild", "severe"].__getitem__)
        self.features = {"age": None, "sex": None, "outcome": labels}

    def __getitem__(self, name):
        return COLUMNS[name]


def frames():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(COLUMNS)


@pytest.mark.parametrize(
    "data",
    [
        COLUMNS,
        [{name: column[row] for name, column in COLUMNS.items()} for row in range(3)],
        frames,
        Frames(),
    ],
)
def test_tables_in_every_form_are_the_same_table(data):
    given = data() if data is frames else data
    table, left = own_data(given, {"target": "outcome"})
    assert isinstance(table, Table)
    assert left == {"target": "outcome"}
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 3
    expected = ["mild", "severe", "severe"] if isinstance(given, Frames) else [0, 1, 1]
    assert table.columns["outcome"].tolist() == expected
    assert table.columns["age"].tolist()[::2] == [61, 30]


def test_a_hugging_face_data_set_is_a_table():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({
        "age": datasets.Value("float32"),
        "sex": datasets.Value("string"),
        "outcome": datasets.ClassLabel(names=["mild", "severe"]),
    })  # fmt: skip
    data = datasets.Dataset.from_dict(COLUMNS, features=features)
    assert as_table(data).columns["outcome"].tolist() == ["mild", "severe", "severe"]
    with pytest.raises(bflcore.DataError, match="data has the splits train; give one of them"):
        own_data(datasets.DatasetDict(train=data), {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data: int is not allowed; allowed: a data frame or a dict of columns"),
        ([], "data: list is not allowed"),
        ({"a": [1, 2], "b": [1]}, "data: columns have different lengths: .'a': .2,., 'b': .1,.."),
        ([1, 2], "an item of list is int; allowed: .x, y. or .x, y, client."),
    ],
)
def test_other_data_are_refused_in_one_line(data, message):
    with pytest.raises(bflcore.DataError, match=message):
        own_data(data, {})


def test_an_array_is_not_a_table():
    assert as_table(X) is None
