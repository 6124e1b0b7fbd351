"""Label noises with one mistake fail the checks that name it, and no others."""

import numpy as np
import pytest

from bflcore.data.label_noise import Pair, Symmetric
from bflcore.testing import label_noise_checks

from .verdicts import failing, label, sentences, wrong

ROWS = "rows are probabilities"
EPS = "labels change with probability eps"


def noise(mistake, change):
    def transition(self, classes):
        return change(Pair.transition(self, classes))

    return wrong(Pair, mistake, transition=transition)


WRONG = [
    (noise("Forgets where labels go", lambda matrix: np.diag(np.diag(matrix))), {ROWS}),
    (noise("Adds labels", lambda matrix: 2 * np.eye(len(matrix)) - matrix), {ROWS, EPS}),
    (noise("Has a row too many", lambda matrix: np.vstack([matrix, matrix[:1]])), {ROWS}),
    (noise("Changes twice", lambda matrix: matrix @ matrix), {EPS}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_label_noise_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("part", [Pair, Symmetric])
def test_a_right_label_noise_passes(part):
    assert failing(part) == set()


def test_every_check_has_a_label_noise_that_fails_it():
    names = sentences(label_noise_checks.checks_of(Pair))
    assert set().union(*(expected for _, expected in WRONG)) == names
