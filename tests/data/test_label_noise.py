"""Label noise: its matrices, what it touches, and whose draws it uses."""

import attrs
import numpy as np
import pytest

from bflcore.data.base import Dataset
from bflcore.data.label_noise import Pair, Symmetric, mislabelled
from bflcore.errors import DataError


def dataset(samples=40_000, classes=4):
    y = np.arange(samples) % classes
    return Dataset("made", "classification", np.zeros((samples, 1), np.float32), y, classes)


def test_a_pair_mistakes_a_class_for_the_next_cyclically():
    expected = [[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.1, 0.0, 0.9]]
    np.testing.assert_allclose(Pair(eps=0.1).transition(3), expected)


def test_symmetric_noise_takes_any_other_class_alike():
    expected = [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]]
    np.testing.assert_allclose(Symmetric(eps=0.6).transition(3), expected)


@pytest.mark.parametrize("noise", [Pair(eps=0.4), Symmetric(eps=0.6), Symmetric(eps=0.0)])
def test_labels_change_as_often_as_the_matrix_says(noise):
    data = dataset()
    train = np.arange(len(data.y))
    noisy = mislabelled(data, noise, train, np.random.default_rng(0))
    counts = np.zeros((4, 4))
    np.add.at(counts, (data.y, noisy.y), 1)
    # 10,000 samples a class: a frequency's standard deviation is at most 0.005
    np.testing.assert_allclose(counts / 10_000, noise.transition(4), atol=0.025)
    assert not counts[noise.transition(4) == 0].any()


def test_only_training_labels_change_and_the_data_stays_untouched():
    data = attrs.evolve(dataset(), y_test=np.arange(8) % 4, x_test=np.zeros((8, 1), np.float32))
    before = data.y.copy()
    train = np.arange(0, len(data.y), 2)
    noisy = mislabelled(data, Pair(eps=0.9), train, np.random.default_rng(0))
    assert np.array_equal(data.y, before)
    assert np.array_equal(noisy.y[1::2], before[1::2])
    assert (noisy.y[::2] != before[::2]).mean() > 0.8
    assert noisy.y_test is data.y_test


def test_a_regression_has_no_labels_to_change():
    data = attrs.evolve(dataset(8), task="regression", y=np.zeros((8, 1), np.float32))
    with pytest.raises(DataError, match="--label-noise: pair needs class labels, made is a regr"):
        mislabelled(data, Pair(), np.arange(8), np.random.default_rng(0))
