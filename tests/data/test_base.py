"""Data sets in memory."""

import numpy as np
import pytest

from bflcore.data import Dataset


@pytest.mark.parametrize(
    ("task", "y", "classes", "outputs"),
    [
        ("classification", np.array([0, 1, 0]), 4, 4),  # classes that nobody has are outputs, too
        ("regression", np.zeros((3, 2), np.float32), 0, 2),
    ],
)
def test_a_model_needs_an_output_per_class_or_target(task, y, classes, outputs):
    assert Dataset("toy", task, np.zeros((3, 5), np.float32), y, classes).outputs == outputs
