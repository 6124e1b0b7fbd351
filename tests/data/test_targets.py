"""Targets as labels or amounts, and owners by number or name."""

import numpy as np
import pytest

from bflcore import DataError
from bflcore.data.targets import owners_of, targets_of


def found(values, task=None, *, table=False):
    return targets_of(np.asarray(values), "t.csv", "outcome", task, table=table)


DAYS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144] * 3


@pytest.mark.parametrize(
    ("values", "labels", "names"),
    [
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        ([True, False], [1, 0], ("False", "True")),
        ([0, 1, 2, 1], [0, 1, 2, 1], ("0", "1", "2")),
        ([0.0, 2.0, 1.0], [0, 2, 1], ("0", "1", "2")),  # as pandas stores integers with gaps
        (np.eye(3)[[2, 0, 1]], [2, 0, 1], ("0", "1", "2")),
        (np.eye(2, dtype=int)[[1, 0]], [1, 0], ("0", "1")),
    ],
)
def test_labels_in_all_their_forms_are_a_classification(values, labels, names):
    targets = found(values)
    assert targets.task == "classification"
    assert targets.y.tolist() == labels
    assert (targets.classes, targets.names) == (len(names), names)
    assert f"classification of {len(names)} classes" in targets.note


@pytest.mark.parametrize("values", [[0.5, 1, 2], [0.0, 2.0, 4.0], [[0.5, 1], [1, 2]]])
def test_amounts_are_a_regression(values):
    targets = found(values)
    assert targets.task == "regression"
    np.testing.assert_array_equal(targets.y, np.asarray(values).reshape(len(values), -1))
    assert targets.y.dtype == np.float32


def test_many_whole_numbers_in_a_table_are_amounts_and_few_are_labels():
    days = found(DAYS, table=True)
    assert days.task == "regression"
    assert days.note == (
        "task: regression on outcome (12 different whole numbers; --task classification takes them "
        "as labels)"
    )
    grade = found([1, 2, 4] * 4, table=True)
    assert (grade.task, grade.names) == ("classification", ("1", "2", "4"))
    assert grade.note.endswith("(outcome: 1, 2, 4); --task regression takes them as numbers")


def test_the_task_decides_if_it_is_given():
    assert found([0, 1, 2], "regression").y.tolist() == [[0], [1], [2]]
    assert found(np.eye(2), "regression").y.tolist() == [[1, 0], [0, 1]]
    assert found(DAYS, "classification", table=True).classes == 12
    assert found(["1", "2.5"], "regression", table=True).y.tolist() == [[1], [2.5]]
    assert found([0, 2, 4, 0], "classification").y.tolist() == [0, 1, 2, 0]
    assert found([True, False], "regression").y.tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        ([0, 2, 4], None, "4 but has no label 1; if these are amounts .*: --task regression"),
        ([-1, 0, 1], None, "has the label -1; allowed: 0..C-1; --task regression takes them"),
        ([1, 1, 1], "classification", "a single class"),
        ([0.5, 1], "classification", "has fractions, which are not labels; allowed: regression"),
        (
            ["a", "b"],
            "regression",
            "has 'a', which is not a number; allowed: --task classification",
        ),
        ([[0.5, 1]], "classification", "allowed: one label per sample, or one-hot rows"),
        ([1.0, np.nan, 2], None, r"is missing in 1 samples \(the first is sample 1\)"),
        ([np.inf, 1.5], None, "infinity or more than float32 holds"),
        ([[np.nan, 1.5]], None, "missing or not numbers"),
        (np.zeros((2, 2, 2)), None, "allowed: .N. or .N, targets."),
        (
            [f"patient {i}" for i in range(30)],
            None,
            "30 different labels in 30 samples, like an id",
        ),
    ],
)
def test_other_targets_are_refused_in_one_line(values, task, message):
    with pytest.raises(DataError, match=message) as error:
        found(values, task)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "owners", "ids"),
    [
        ([900, 7, 107, 7], [2, 0, 1, 0], (7, 107, 900)),
        ([900.0, 7.0], [1, 0], (7, 900)),
        (["900", "7"], [1, 0], (7, 900)),
        (["007", "8"], [0, 1], ("007", "8")),
        (["ukb", "charité"], [1, 0], ("charité", "ukb")),
    ],
)
def test_owners_keep_their_ids(values, owners, ids):
    number, found_ids = owners_of(np.array(values), "t.csv", "hospital")
    assert (number.tolist(), found_ids) == (owners, ids)
    assert [type(one) for one in found_ids] == [type(one) for one in ids]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", ""], r"hospital is missing in 1 samples \(the first is sample 1\)"),
        ([0.5, 1], "has fractions; allowed: whole numbers or names"),
        ([[1]], "allowed: one owner per sample"),
    ],
)
def test_other_owners_are_refused(values, message):
    with pytest.raises(DataError, match=message):
        owners_of(np.array(values), "t.csv", "hospital")
