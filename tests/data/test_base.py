"""Data sets in memory."""

import attrs
import numpy as np
import pytest

from bflcore.data import Dataset, centred, standardised
from bflcore.data.sources import Boston, Digits
from bflcore.errors import OptionError


def test_standardising_uses_training_samples_alone():
    data, train = Boston().load(), np.arange(300)
    scaled = standardised(data, train)
    np.testing.assert_allclose(scaled.x[train].mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(scaled.y[train].std(0), 1, rtol=1e-4)
    shifted = attrs.evolve(data, x=np.where(np.arange(506)[:, None] < 300, data.x, 99))
    np.testing.assert_array_equal(standardised(shifted, train).x[train], scaled.x[train])


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
