"""Data sets in memory."""

import attrs
import numpy as np
import pytest

from bflcore.data import Dataset, centred
from bflcore.data.sources import Digits
from bflcore.errors import OptionError


@pytest.mark.parametrize(
    ("task", "y", "classes", "outputs"),
    [
        ("classification", np.array([0, 1, 0]), 4, 4),  # classes that nobody has are outputs, too
        ("regression", np.zeros((3, 2), np.float32), 0, 2),
    ],
)
def test_a_model_needs_an_output_per_class_or_target(task, y, classes, outputs):
    assert Dataset("toy", task, np.zeros((3, 5), np.float32), y, classes).outputs == outputs


def images(x, x_test=None):
    y = np.zeros(len(x), np.int64)
    y_test = None if x_test is None else np.zeros(len(x_test), np.int64)
    return Dataset("mine", "classification", x, y, 2, x_test=x_test, y_test=y_test)


def test_centred_images_are_normalised_by_a_half_and_a_half():
    data = Digits().load()
    found = centred(data)
    np.testing.assert_allclose(found.x, (data.x - 0.5) / 0.5, atol=1e-6)
    assert found.x.dtype == np.float32
    assert (found.x.min(), found.x.max()) == (-1, 1)
    assert data.x.min() == 0


def test_held_out_images_are_centred_with_the_others():
    x = np.array([0.25, 0.5], np.float32).reshape(2, 1, 1, 1)
    found = centred(images(x, x + 0.5))
    assert found.x.ravel().tolist() == [-0.5, 0]
    assert found.x_test.ravel().tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("x", "x_test", "said"),
    [
        (np.zeros((2, 3), np.float32), None, r"samples of shape \[3\] with values from 0 to 0"),
        (np.full((2, 1, 1, 1), 255, np.float32), None, "values from 255 to 255"),
        (np.zeros((2, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), -3, np.float32), "from -3 to 0"),
    ],
)
def test_other_inputs_cannot_be_centred(x, x_test, said):
    with pytest.raises(OptionError, match=f"--input-range: .* mine has .*{said}.* allowed here"):
        centred(images(x, x_test))


def test_bytes_are_centred_in_their_unit():
    bytes_ = attrs.evolve(images(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)), unit=255)
    assert centred(bytes_).x.ravel().tolist() == [-1, 1]
