"""Partitions with one mistake fail the checks that name it, and no others."""

import numpy as np
import pytest

from bflcore.data.partition import IID
from bflcore.testing import checks, partition_checks

from .verdicts import failing, label, sentences, wrong

UNTOUCHED = "inputs stay untouched"
EVERY = "every client gets samples"
NOBODY = "nobody shares a sample"
GENERATOR = "depends on its generator alone"


def sort_the_labels(self, dataset, clients, rng):
    dataset.y.sort()
    return IID.assign(self, dataset, clients, rng)


def to_one_more(self, dataset, clients, rng):
    return IID.assign(self, dataset, clients + 1, rng)


def all_to_the_first(self, dataset, clients, rng):
    nobody = np.array([], int)
    return [np.arange(len(dataset.x)), *([nobody] * (clients - 1))]


def overlapping(self, dataset, clients, rng):
    return [np.append(share, 0) for share in IID.assign(self, dataset, clients, rng)]


def one_too_far(self, dataset, clients, rng):
    return [share + 1 for share in IID.assign(self, dataset, clients, rng)]


def by_global_state(self, dataset, clients, rng):
    return np.array_split(np.random.permutation(len(dataset.x)), clients)  # noqa: NPY002


WRONG = [
    (wrong(IID, "Sorts the labels in place", assign=sort_the_labels), {UNTOUCHED}),
    (wrong(IID, "Divides among one more", assign=to_one_more), {EVERY}),
    (wrong(IID, "Gives everything to the first", assign=all_to_the_first), {EVERY}),
    (wrong(IID, "Gives a sample to all", assign=overlapping), {NOBODY}),
    (wrong(IID, "Counts from one", assign=one_too_far), {NOBODY}),
    (wrong(IID, "Draws from the global state", assign=by_global_state), {GENERATOR}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_partition_fails_exactly(part, expected):
    assert failing(part) == expected


def test_every_check_has_a_partition_that_fails_it():
    names = sentences(partition_checks.checks_of(IID))
    assert set().union(*(expected for _, expected in WRONG)) == names


def test_checking_leaves_the_global_state_as_it_was():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    for check in checks(IID):
        check.outcome()
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
