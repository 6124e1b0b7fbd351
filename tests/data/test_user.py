import zipfile

import numpy as np
import pytest

from bflcore import DataError, OptionError
from bflcore.data.base import encoded
from bflcore.data.user import Arrays, OwnData, is_own, load_npz, load_rows
from bflcore.options.settings import DataSettings


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
        (
            {"x": X, "y": Y, "client": Y / 4},
            "client has fractions; allowed: whole numbers or names",
        ),
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
    with pytest.raises(DataError, match="client has fractions"):
        load_npz(save(tmp_path, x=X, y=Y, client=Y, **test | {"client_test": np.array([0.5, 1])}))


def test_labels_and_owners_may_be_names(tmp_path):
    names = np.array(["mild", "severe", "none"])[Y]
    owners = np.array(["ukb", "charité"])[Y % 2]
    tests = {"x_test": X[:1], "y_test": names[:1], "client_test": owners[1:2]}
    data = load_npz(save(tmp_path, x=X, y=names, client=owners, **tests))
    assert data.class_names == ("mild", "none", "severe")
    assert [data.class_names[label] for label in data.y] == names.tolist()
    assert [data.owner(number) for number in data.client] == owners.tolist()
    assert data.owner(data.client_test[0]) == "charité"
    assert data.y_test.tolist() == [0]


def test_labels_of_known_classes_may_be_incomplete_and_not_others(tmp_path):
    assert load_npz(save(tmp_path, x=X, y=Y), classes=5).classes == 5
    with pytest.raises(DataError, match="y has label 2; allowed: 0 to 1"):
        load_npz(save(tmp_path, x=X, y=Y), classes=2)
    with pytest.raises(DataError, match="allowed: one label, 0 to 1, per sample"):
        load_npz(save(tmp_path, x=X, y=Y / 3), classes=2)


def read(path, task=None, standardise=None, given=None, **settings):
    return OwnData(standardise=standardise).read(
        given, DataSettings(data=str(path), **settings), task
    )


def test_arrays_with_missing_values_are_a_table_if_they_are_standardised(tmp_path):
    path = save(tmp_path, x=NAN, y=Y, x_test=X, y_test=Y)
    with pytest.raises(DataError, match="-o dataset.standardise=true puts means in place of NaN"):
        read(path)
    data = encoded(read(path, standardise=True), np.arange(6))
    assert data.standardise
    assert data.schema.features == ("x[0]", "x[1]", "x[1] is missing")
    np.testing.assert_array_equal(data.x[:, 2], [0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(data.x_test, np.c_[X, np.zeros(6)])
    assert encoded(read(path, standardise=True), np.arange(4)).schema.features == ("x[0]", "x[1]")


CSV = """age,sex,hospital,outcome
61,f,ukb,mild
,m,ukb,none
35,m,charité,none
44,f,charité,severe
"""


@pytest.fixture
def patients(tmp_path):
    (tmp_path / "patients.csv").write_text(CSV)
    return tmp_path / "patients.csv"


def test_a_table_gives_features_labels_and_owners(patients):
    data = read(patients, target="outcome", client="hospital")
    assert (data.task, data.class_names) == ("classification", ("mild", "none", "severe"))
    assert (data.y.tolist(), data.client.tolist()) == ([0, 1, 1, 2], [1, 1, 0, 0])
    assert data.owners == ("charité", "ukb")
    assert data.standardise
    features = encoded(data, np.arange(4))
    assert features.schema.features == ("age", "age is missing", "sex=f", "sex=m")
    np.testing.assert_array_equal(features.x[1], [np.nan, 1, 0, 1])
    assert data.notes == ("task: classification of 3 classes (column outcome: mild, none, severe)",)


def test_a_folder_gives_the_same_with_the_files_as_owners(patients, tmp_path):
    folder = tmp_path / "hospitals"
    folder.mkdir()
    header, *lines = CSV.splitlines()
    for owner in ("ukb", "charité"):
        own = [header, *(line for line in lines if owner in line)]
        (folder / f"{owner}.csv").write_text("\n".join(own) + "\n")
    one = read(patients, target="outcome", client="hospital")
    many = read(folder, target="outcome", drop=("hospital",))
    assert many.owners == one.owners
    order = np.argsort(one.client, kind="stable")
    np.testing.assert_array_equal(many.x, one.x[order])
    assert many.client.tolist() == one.client[order].tolist()
    with pytest.raises(OptionError, match="--client: in a folder, the names of the files are"):
        read(folder, target="outcome", client="hospital")


def test_columns_may_be_left_out(patients):
    data = read(patients, target="outcome", client="hospital", drop=("sex",))
    assert [column.name for column in data.schema.columns] == ["age"]
    with pytest.raises(DataError, match="has no column besides outcome, hospital, sex, age"):
        read(patients, target="outcome", client="hospital", drop=("sex", "age"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--target is missing: the column to predict; .* has age, sex, hospital, outcome"),
        ({"target": "outcom"}, "--target: .* has no column 'outcom'; it has age, sex"),
        ({"target": "outcome", "client": "clinic"}, "--client: .* has no column 'clinic'"),
        ({"target": "outcome", "drop": ("id",)}, "--drop: .* has no column 'id'"),
        ({"target": "outcome", "task": "regression"}, "'mild', which is not a number"),
        ({"target": "outcome", "standardise": False}, "dataset.standardise: column age .* missing"),
        ({"target": "outcome", "data_dir": "x"}, "--data-dir has no effect on"),
        ({"target": "outcome", "download": True}, "--download has no effect on"),
    ],
)
def test_settings_that_do_not_fit_a_table_are_refused_in_one_line(patients, settings, message):
    with pytest.raises((DataError, OptionError), match=message) as error:
        read(patients, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["target", "client", "drop"])
def test_columns_of_arrays_are_refused(tmp_path, flag):
    path = save(tmp_path, x=X, y=Y)
    value = ("a",) if flag == "drop" else "a"
    with pytest.raises(OptionError, match=f"--{flag} names a column of a table, but .* has arrays"):
        read(path, **{flag: value})


def test_data_from_python_are_used_where_they_are_given():
    given = Arrays({"x": X, "y": Y})
    assert read("memory", given=given).x.shape == (6, 2)
    with pytest.raises(DataError, match="given from Python and are not kept; continue with"):
        read("memory")


def test_a_table_is_read_as_the_schema_of_others_says(patients, tmp_path):
    schema = encoded(read(patients, target="outcome", drop=("hospital",)), np.arange(4)).schema
    path = tmp_path / "more.csv"
    path.write_text("outcome,sex,age\nsevere,x,50\nmild,f,\n")
    data = load_rows(path, schema, "classification", ("mild", "none", "severe"))
    np.testing.assert_array_equal(data.x, [[50, 0, 0, 0], [np.nan, 1, 1, 0]])
    assert (data.y.tolist(), data.classes) == ([2, 0], 3)
    with pytest.raises(DataError, match="column outcome has 'severe'; allowed: mild, none"):
        load_rows(path, schema, "classification", ("mild", "none"))
    path.write_text("outcome,sex,age\n3.5,m,50\n")
    assert load_rows(path, schema, "regression", ()).y.tolist() == [[3.5]]


def test_own_is_not_a_data_set_by_itself():
    with pytest.raises(DataError, match="give a file .npz, .csv"):
        OwnData().load()


def test_files_and_folders_are_told_from_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(is_own, ("a.csv", "A.CSV", "a.npz", "a.parquet", "x/y", "memory")))
    assert not is_own("digits")
    (tmp_path / "hospitals").mkdir()
    assert is_own("hospitals")
