"""Data sets in memory."""

import attrs
import numpy as np

from bflcore.data import standardised
from bflcore.data.sources import (
    Boston,
)


def test_standardising_uses_training_samples_alone():
    data, train = Boston().load(), np.arange(300)
    scaled = standardised(data, train)
    np.testing.assert_allclose(scaled.x[train].mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(scaled.y[train].std(0), 1, rtol=1e-4)
    shifted = attrs.evolve(data, x=np.where(np.arange(506)[:, None] < 300, data.x, 99))
    np.testing.assert_array_equal(standardised(shifted, train).x[train], scaled.x[train])
