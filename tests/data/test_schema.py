"""The schema: kinds of columns, and the features that they become."""

import json

import attrs
import numpy as np
import pytest

from bflcore import DataError
from bflcore.data.schema import Column, Schema
from bflcore.data.tables import Table

AGE = [61, None, 30, 45, 52, None]
SEX = ["f", "m", "m", None, "x", "f"]


def table(**columns):
    return Table({name: np.array(values, object) for name, values in columns.items()}, "t.csv")


def trained(columns, rows):
    """Return the schema of the training samples `rows`, and the features of all samples."""
    of = table(**columns, y=[0] * len(next(iter(columns.values()))))
    whole, _ = Schema.infer(of, "y", ())
    schema, (codes,) = whole.of_training(whole.codes(of), np.array(rows))
    return schema, schema.encode(codes)


def test_numbers_categories_and_missing_values_become_features():
    schema, x = trained({"age": AGE, "sex": SEX}, rows=range(6))
    assert schema.features == (
        *("age", "age is missing"),
        *("sex=f", "sex=m", "sex=x", "sex is missing"),
    )
    nan = np.nan
    expected = [
        [61, 0, 1, 0, 0, 0],
        [nan, 1, 0, 1, 0, 0],
        [30, 0, 0, 1, 0, 0],
        [45, 0, 0, 0, 0, 1],
        [52, 0, 0, 0, 1, 0],
        [nan, 1, 1, 0, 0, 0],
    ]
    np.testing.assert_array_equal(x, expected)
    assert x.dtype == np.float32
    assert schema.indicators == (False, *[True] * 5)


def test_categories_and_indicators_are_those_of_the_training_samples():
    schema, x = trained({"age": AGE, "sex": SEX}, rows=[0, 2])
    assert schema.features == ("age", "sex=f", "sex=m")
    # "x" is in no training sample: none of the known. A missing value stays missing.
    np.testing.assert_array_equal(x[:, 1:], [[1, 0], [0, 1], [0, 1], [0, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(np.isnan(x[:, 0]), [False, True, False, False, False, True])


def test_categories_equal_those_of_pandas():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    values = rng.choice(["a", "b", "c", "d"], 200).astype(object)
    _, x = trained({"ward": values}, rows=range(200))
    np.testing.assert_array_equal(x, pandas.get_dummies(pandas.Series(values)).to_numpy())


def test_a_column_without_a_training_value_is_not_used():
    schema, x = trained({"age": AGE, "lactate": [None, 2.1, None, None, None, 1]}, rows=[0, 2])
    assert schema.features == ("age",)
    assert x.shape == (6, 1)
    again = schema.read(table(age=[3]))[0]
    np.testing.assert_array_equal(again, [[3]])


def test_new_samples_are_read_by_name_in_any_order():
    schema, x = trained({"age": AGE, "sex": SEX}, rows=range(6))
    again, notes = schema.read(table(sex=SEX, y=[""] * 6, age=AGE))
    np.testing.assert_array_equal(again, x)
    assert notes == ()


def test_what_is_ignored_in_new_samples_is_said():
    schema, _ = trained({"age": AGE, "sex": SEX}, rows=[0, 1, 2, 5])
    x, notes = schema.read(table(age=["4"], sex=["unknown"], zip=["10115"]))
    np.testing.assert_array_equal(x, [[4, 0, 0, 0]])
    assert notes == (
        "columns that the model does not know are ignored: zip",
        "column sex: no training sample has unknown; such values count as none of the known",
    )


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"age": [1]}, "t.csv has no column 'sex'; the model needs age, sex"),
        ({"age": [1, "old"], "sex": ["f", "f"]}, "column age has 'old' in row 2, which is not a n"),
        ({"age": ["inf"], "sex": ["f"]}, "column age has infinity"),
        ({"age": ["yes", "perhaps"], "sex": ["f", "f"]}, "has 'perhaps' in row 2, which is not"),
    ],
)
def test_new_samples_of_another_form_are_refused_in_one_line(new, message):
    schema, _ = trained({"age": AGE, "sex": SEX}, rows=range(6))
    with pytest.raises(DataError, match=message) as error:
        schema.read(table(**new))
    assert "\n" not in str(error.value)


def test_numbers_may_be_given_by_position():
    schema, x = trained({"age": AGE, "bmi": [20, 21, 22, 23, 24, 25]}, rows=range(6))
    rows = np.array([AGE, [20, 21, 22, 23, 24, 25]], float).T
    np.testing.assert_array_equal(schema.read_numbers(rows), x)
    with_category, _ = trained({"age": AGE, "sex": SEX}, rows=range(6))
    with pytest.raises(DataError, match="column sex is a category; give a table with names"):
        with_category.read_numbers(rows)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["2024-01-31"] * 30, r"holds dates \(2024-01-31\).*days since an event.*--drop c"),
        (["31.1.24 10:00", ""] * 15, "holds dates"),
        ([np.datetime64("2024-01-31")] * 30, "holds dates"),
        (
            [f"patient {i}" for i in range(30)],
            "30 different texts in 30 rows, like an id.*--drop c",
        ),
        (["1,5", *map(str, range(29))], "column c has '1,5' in row 1, which is not a number"),
    ],
)
def test_dates_names_and_slips_are_refused_with_advice(column, message):
    with pytest.raises(DataError, match=message) as error:
        Schema.infer(table(c=column, y=[0] * 30), "y", ())
    assert "\n" not in str(error.value)


def test_dates_of_numpy_are_refused():
    column = np.array(["2024-01-31"], "datetime64[D]")
    with pytest.raises(DataError, match="holds dates"):
        Schema.infer(Table({"c": column, "y": np.zeros(1)}), "y", ())


def test_numbers_that_count_the_samples_are_pointed_out():
    columns = {"patient_id": list(range(30)), "age": list(range(30)), "y": [0] * 30}
    _, notes = Schema.infer(table(**columns), "y", ())
    assert len(notes) == 1
    assert "column patient_id has a different whole number in each row" in notes[0]
    assert Schema.infer(table(**columns), "y", ("patient_id",))[1] == ()


def test_a_table_of_the_target_alone_is_refused():
    with pytest.raises(DataError, match="no column besides y, h"):
        Schema.infer(table(y=[1], h=[1]), "y", ("h",))


def test_cells_that_hold_vectors_are_refused():
    image = Table({"c": np.zeros((3, 4)), "y": np.zeros(3)})
    with pytest.raises(DataError, match=r"column c has shape \[3, 4\]; allowed: one value per"):
        Schema.infer(image, "y", ())


def test_a_schema_comes_back_from_json():
    schema = Schema((Column("a", "number", (), True), Column("b", "category", ("x",))), "y", ("h",))
    assert Schema.from_json(json.loads(json.dumps(attrs.asdict(schema)))) == schema


def test_a_reference_category_has_no_feature_and_stays_one_in_json():
    column = Column("sex", "category", ("f", "m", "x"), missing=True).with_reference()
    assert column.features == ("sex=m", "sex=x", "sex is missing")
    codes = np.array([0.0, 1.0, 2.0, np.nan, -1.0])
    assert column.encode(codes).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    schema = Schema((column,), "y")
    assert Schema.from_json(json.loads(json.dumps(attrs.asdict(schema)))) == schema
    assert Column("age", "number").with_reference() == Column("age", "number")


def test_an_unseen_category_counts_as_the_reference():
    schema = Schema((Column("sex", "category", ("f", "m")).with_reference(),), "y")
    x, notes = schema.read(table(sex=["m", "z"]))
    assert x.tolist() == [[1], [0]]
    assert notes[0].endswith("has z; such values count as f")
