"""Tables: written whole, by suffix; examples read from one file."""

from __future__ import annotations

import numpy as np
import pytest

from bflcore.api.inputs import read_samples
from bflcore.api.tables import check_table, read_examples, write_table
from bflcore.errors import DataError, OptionError, RunError

COLUMNS = {"label": ["a", "b, c"], "probability_a": [0.1, 1 / 3]}


def test_a_csv_file_has_every_digit_and_quotes_commas(tmp_path):
    write_table(tmp_path / "p.csv", COLUMNS)
    assert (tmp_path / "p.csv").read_text() == (f'label,probability_a\na,0.1\n"b, c",{1 / 3!r}\n')


def test_a_parquet_file_has_typed_columns(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table(tmp_path / "p.parquet", COLUMNS)
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table.to_pydict() == COLUMNS
    assert [str(kind) for kind in table.schema.types] == ["string", "double"]


def test_an_npz_file_has_an_array_per_column_and_nothing_to_unpickle(tmp_path):
    write_table(tmp_path / "p.npz", COLUMNS)
    with np.load(tmp_path / "p.npz", allow_pickle=False) as file:
        assert {name: file[name].tolist() for name in file.files} == COLUMNS
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def test_another_format_or_a_missing_library_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="allowed: a name that ends in .csv, .parquet, .npz"):
        check_table(tmp_path / "p.json")
    monkeypatch.setattr("bflcore.api.tables.find_spec", lambda _: None)
    check_table(tmp_path / "p.csv")
    with pytest.raises(RunError, match=r"pip install 'bflcore\[tables\]'"):
        write_table(tmp_path / "p.parquet", COLUMNS)


def test_examples_are_x_and_y_of_one_file(tmp_path):
    x, y = np.arange(6.0).reshape(2, 3), np.array(["a", "b"])
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    found = read_examples(tmp_path / "mine.npz")
    assert [a.tolist() for a in found] == [x.tolist(), y.tolist()]
    np.savez(tmp_path / "other.npz", y=y, z=x)
    with pytest.raises(DataError, match="array 'x' is missing; the file has y, z"):
        read_examples(tmp_path / "other.npz")
    np.save(tmp_path / "array.npz.npy", x)
    for name in ("absent.npz", "array.npz.npy"):
        with pytest.raises(DataError, match="cannot be read .*; give an .npz file with x and y"):
            read_examples(tmp_path / name)


def test_samples_of_a_parquet_file_are_its_columns(tmp_path):
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    write_table(tmp_path / "x.parquet", {f"c{i}": x[:, i].tolist() for i in range(4)})
    assert np.array_equal(read_samples(tmp_path / "x.parquet", (4,)), x)
    assert read_samples(tmp_path / "x.parquet", (1, 2, 2)).shape == (5, 1, 2, 2)
    with pytest.raises(DataError, match="has 4 columns, but the model's samples have 3 values"):
        read_samples(tmp_path / "x.parquet", (3,))
    write_table(tmp_path / "words.parquet", {"a": ["x", "y"]})
    with pytest.raises(DataError, match="cannot be read"):
        read_samples(tmp_path / "words.parquet", (1,))
