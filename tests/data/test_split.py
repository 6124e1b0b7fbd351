"""Splits of clients' samples: for validation, and of a held-out test split among clients."""

from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore.data import Dataset, divide
from bflcore.data.partition import IID, Labels, Natural
from bflcore.data.split import deal, hold_out, split


def dataset(labels, **more):
    y = np.asarray(labels)
    return Dataset("toy", "classification", np.zeros((len(y), 1)), y, int(y.max()) + 1, **more)


def held_out(labels, tests, **more):
    return dataset(labels, x_test=np.zeros((len(tests), 1)), y_test=np.asarray(tests), **more)


def rng(seed=0):
    return np.random.default_rng(seed)


LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60)
FRACTIONS = st.sampled_from([0.01, 0.1, 0.2, 0.5, 0.9, 0.99])


@given(LABELS, FRACTIONS, st.integers(0, 20))
def test_validation_samples_are_cut_off_and_the_others_keep_their_order(labels, fraction, seed):
    mine = rng(seed).permutation(len(labels))
    train, held = hold_out(dataset(labels), mine, fraction, rng(seed))
    assert set(train) | set(held) == set(mine)
    assert not set(train) & set(held)
    for part in (train, held):
        assert part.tolist() == [sample for sample in mine if sample in part]


@given(LABELS, FRACTIONS, st.integers(0, 20))
def test_every_class_gives_its_share_to_less_than_one_sample(labels, fraction, seed):
    total = len(labels)
    _, held = hold_out(dataset(labels), np.arange(total), fraction, rng(seed))
    assert len(held) == (0 if total == 1 else min(max(1, round(fraction * total)), total - 1))
    found = Counter(np.asarray(labels)[held].tolist())
    for label, count in Counter(labels).items():
        assert abs(found[label] - count * len(held) / total) < 1


def test_a_client_of_one_sample_trains_on_it_and_two_samples_serve_both_purposes():
    data = dataset([0, 1, 1])
    assert [len(part) for part in hold_out(data, np.array([2]), 0.9, rng())] == [1, 0]
    assert [len(part) for part in hold_out(data, np.array([0, 2]), 0.01, rng())] == [1, 1]


def test_the_validation_samples_of_a_regression_are_drawn_regardless_of_targets():
    y = np.linspace(0, 1, 50, dtype=np.float32)[:, None]
    data = Dataset("line", "regression", np.zeros((50, 1)), y)
    train, held = hold_out(data, np.arange(50), 0.2, rng())
    assert (len(train), len(held)) == (40, 10)
    assert held.tolist() != sorted(range(40, 50))


CLASSES = st.integers(1, 5)


@given(CLASSES, st.integers(2, 9), st.integers(0, 20), st.integers(0, 60))
def test_each_held_out_sample_goes_to_one_client_that_trains_on_its_class(k, clients, seed, tests):
    labels = rng(seed).integers(0, 5, 200)
    labels[:5] = range(5)
    data = held_out(labels, rng(seed + 1).integers(0, 5, max(tests, 1)))
    part = divide(data, Labels(k=k), clients, rng(seed))
    dealt = np.concatenate(part.test)
    trained = np.isin(data.y_test, data.y[np.concatenate(part.train)])
    assert sorted(dealt.tolist()) == np.flatnonzero(trained).tolist()  # once each, none twice
    for trains, own in zip(part.train, part.test, strict=True):
        assert set(data.y_test[own]) <= set(data.y[trains])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 9))
def test_a_client_gets_test_samples_in_proportion_to_its_training_samples(sizes, tests, seed):
    sizes = [*sizes, 1]
    data = held_out(np.zeros(sum(sizes), np.int64), np.zeros(tests + 1, np.int64))
    shares = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    hands = deal(data, shares, rng(seed))
    assert sum(map(len, hands)) == tests + 1
    for hand, size in zip(hands, sizes, strict=True):
        assert abs(len(hand) - (tests + 1) * size / sum(sizes)) < 1


def test_the_test_samples_of_a_client_have_the_classes_of_its_training_samples():
    labels = np.repeat([0, 1, 0, 1], [90, 10, 10, 90])  # of two clients
    data = held_out(labels, np.repeat([0, 1], 50))
    hands = deal(data, [np.arange(100), np.arange(100, 200)], rng())
    assert [np.bincount(data.y_test[hand]).tolist() for hand in hands] == [[45, 5], [5, 45]]


def test_a_regressions_test_samples_are_dealt_by_size():
    y = np.ones((40, 1), np.float32)
    data = Dataset("line", "regression", y, y, x_test=y[:8], y_test=y[:8])
    part = divide(data, IID(), 4, rng())
    assert [len(own) for own in part.test] == [2] * 4
    assert sorted(np.concatenate(part.test).tolist()) == list(range(8))


def test_owners_are_tested_on_their_own_samples_where_these_are_known():
    owner, tested = np.array([7, 7, 3, 3, 5]), np.array([5, 3, 3, 8, 7])
    data = held_out([0, 1, 0, 1, 0], [1, 0, 0, 1, 1], client=owner, client_test=tested)
    part = divide(data, Natural(), 3, rng())
    assert [tested[own].tolist() for own in part.test] == [[3, 3], [5], [7]]
    known = attrs.evolve(data, client_test=None)
    shares = divide(known, Natural(), 3, rng()).test
    assert sum(map(len, shares)) == 5  # dealt by class instead: every sample once
    mixed = divide(data, IID(), 2, rng()).test  # a client that is not an owner
    assert sum(map(len, mixed)) == 5


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_split_takes_the_fraction_it_is_given(fraction):
    train, test = split(dataset([0, 1] * 10), np.arange(20), rng(), fraction=fraction)
    assert len(test) == 20 * fraction
    assert len(train) == 20 - len(test)
