"""Tables: .csv and .parquet files, folders of them, missing values, numbers and texts."""

import numpy as np
import pytest

from bflcore import DataError
from bflcore.data.tables import Table, missing, numbers, read_folder, read_table, texts


def written(path, text, encoding="utf-8"):
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize(
    "text",
    ["age,city\n61,Köln\n,\n", "age;city\n61;Köln\n;\n", 'age\tcity\n61\t"Köln"\n\t\n\n'],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_the_separator_is_found_and_empty_lines_are_skipped(tmp_path, text, encoding):
    table = read_table(written(tmp_path / "a.csv", text, encoding))
    assert {name: column.tolist() for name, column in table.columns.items()} == {
        "age": ["61", ""],
        "city": ["Köln", ""],
    }


def test_quoted_fields_may_hold_the_separator(tmp_path):
    table = read_table(written(tmp_path / "a.csv", 'a,b\n"x, y",1\n'))
    assert table.columns["a"].tolist() == ["x, y"]


def test_a_parquet_file_gives_the_columns_that_pandas_wrote(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({
        "age": [61.0, np.nan],
        "city": ["Köln", None],
        "icu": [True, False],
        "beds": pandas.array([3, None], "Int64"),
    })  # fmt: skip
    frame.to_parquet(tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    gaps = {name: missing(column).tolist() for name, column in table.columns.items()}
    expected = {"age": [False, True], "city": [False, True], "icu": [False] * 2}
    assert gaps == expected | {"beds": [False, True]}
    beds = table.columns["beds"]
    assert numbers(beds, missing(beds))[0] == 3


def test_without_pyarrow_a_parquet_file_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'bflcore\[tables\]'"):
        read_table(written(tmp_path / "a.parquet", ""))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no samples"),
        (b"a,b\n", "has no samples"),
        (b"a,b\n1,2\n3\n", "a.csv, line 3: 1 fields, but the first line names 2 columns"),
        (b"a,a\n1,2\n", "has two columns 'a'"),
        (b"a\n\xff\xfe\n", "cannot be read .* write it as UTF-8"),
        (None, "does not exist"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_table(tmp_path / "a.csv")
    assert "\n" not in str(error.value)


def test_a_damaged_parquet_file_is_refused_in_one_line(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="cannot be read") as error:
        read_table(written(tmp_path / "a.parquet", "PAR1 nonsense"))
    assert "\n" not in str(error.value)


def test_the_files_of_a_folder_are_the_owners(tmp_path):
    written(tmp_path / "b.csv", "age,sex\n1,f\n2,m\n")
    written(tmp_path / "a.csv", "sex,age\nm,3\n")
    written(tmp_path / "readme.txt", "not a table")
    table = read_folder(tmp_path, "owner")
    assert table.columns["owner"].tolist() == ["a", "b", "b"]
    assert table.columns["age"].tolist() == ["3", "1", "2"]


def test_a_folder_whose_files_differ_names_the_column(tmp_path):
    with pytest.raises(DataError, match="has no table; allowed: one file"):
        read_folder(tmp_path, "owner")
    written(tmp_path / "a.csv", "age,sex\n1,f\n")
    written(tmp_path / "b.csv", "age\n1\n")
    with pytest.raises(DataError, match=r"column 'sex' is not in all files .*a.csv and b.csv"):
        read_folder(tmp_path, "owner")


def test_values_are_missing_in_all_the_usual_spellings():
    pandas = pytest.importorskip("pandas")
    values = ["", " ", "NA", "nan", "?", None, float("nan"), pandas.NA, pandas.NaT, "none", 0, "0"]
    assert missing(np.array(values, object)).tolist() == [True] * 9 + [False] * 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5, "3"], [1, 2.5, 3]),
        (["1e5", " 2 ", ""], [1e5, 2, np.nan]),
        ([True, False, None], [1, 0, np.nan]),
        (["yes", "No", "yes"], [1, 0, 1]),
        (["1", "two", "3"], None),
        (["yes", "perhaps", "no"], None),
    ],
)
def test_numbers_are_read_from_numbers_texts_and_truth_values(values, expected):
    array = np.array(values, object)
    np.testing.assert_equal(numbers(array, missing(array)), expected)


def test_numbers_as_text_have_no_needless_point():
    array = np.array([7.0, 900, "x ", 1.5, None], object)
    assert texts(array, missing(array)) == ["7", "900", "x", "1.5", ""]


def test_a_column_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(DataError, match="--target: data has no column 'y'; it has a, b"):
        Table({"a": np.zeros(1), "b": np.zeros(1)}).column("y", "--target")
