"""Splits: which of a client's samples are for training, and which are held out for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bflcore.data.base import Dataset, Integers
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["deal", "hold_out", "split"]


def split(
    dataset: Dataset,
    share: Integers,
    rng: np.random.Generator,
    train_cap: int | None = None,
    test_cap: int | None = None,
    fraction: float = 0.2,
) -> tuple[Integers, Integers]:
    """Return the training and the test samples of a client's `share`; see `divide`."""
    shuffled = share[rng.permutation(len(share))]
    labels = _classes(dataset, shuffled)
    _, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    start = np.zeros_like(sizes)  # samples of a class before its test samples
    if train_cap is not None:
        start = np.minimum(sizes, train_cap)
        tests = sizes - start if test_cap is None else np.minimum(sizes - start, test_cap)
    elif test_cap is not None:
        tests = np.minimum(sizes // 2, test_cap)
        if test_cap > 0 and len(share) > 1 and tests.sum() == 0:  # every class is a single sample
            tests[first.argmin()] = 1
    else:
        tests = _proportional(sizes, fraction, first)
    grouped = shuffled[np.argsort(labels, kind="stable")]
    rank = np.arange(len(share)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its class
    begin, end = np.repeat(start, sizes), np.repeat(start + tests, sizes)
    trains = rank < begin if train_cap is not None else rank >= end
    return grouped[trains], grouped[(begin <= rank) & (rank < end)]


def hold_out(
    dataset: Dataset,
    train: Integers,
    fraction: float,
    rng: np.random.Generator,
    *,
    by_class: bool = True,
) -> tuple[Integers, Integers]:
    """Divide a client's training samples into those that it trains on and those held out.

    Both keep the order of `train`; with `by_class` the classes keep their proportions, otherwise
    every sample is as likely to be held out. Two samples or more give at least one sample to each;
    a single sample is trained on.
    """
    if len(train) < 2:
        return train, train[:0]
    if by_class:
        _, chosen = split(dataset, train, rng, fraction=fraction)
    else:
        count = min(max(round(len(train) * fraction), 1), len(train) - 1)
        chosen = rng.choice(train, count, replace=False)
    held = np.isin(train, chosen)
    return train[~held], train[held]


def deal(
    dataset: Dataset, train: Sequence[Integers], rng: np.random.Generator, *, by_owner: bool = False
) -> list[Integers]:
    """Give each sample of the held-out test split to one client, or to none.

    A client gets samples of each class in proportion to its training samples of that class
    (largest remainders); samples of a class that nobody trains on are left out. With `by_owner`,
    and where the owners of the test samples are known, each client gets its own.
    """
    assert dataset.x_test is not None  # noqa: S101 - the caller's condition
    assert dataset.y_test is not None  # noqa: S101 - it comes with x_test
    if by_owner and dataset.client is not None and dataset.client_test is not None:
        owners = [dataset.client[samples[0]] for samples in train]
        return [np.flatnonzero(dataset.client_test == owner) for owner in owners]
    classification = dataset.task == "classification"
    labels = dataset.y_test if classification else np.zeros(len(dataset.y_test), np.int64)
    known = [_classes(dataset, samples) for samples in train]
    hands: list[list[Integers]] = [[] for _ in train]
    for label in np.unique(labels):
        samples = rng.permutation(np.flatnonzero(labels == label))
        holdings = np.array([np.count_nonzero(mine == label) for mine in known])
        if holdings.any():
            counts = _apportion(holdings, len(samples), rng.permutation(len(train)))
            for hand, part in zip(hands, np.split(samples, counts.cumsum()[:-1]), strict=True):
                hand.append(part)
    nothing = np.empty(0, np.int64)
    return [np.sort(np.concatenate([nothing, *hand])) for hand in hands]


def _classes(dataset: Dataset, samples: Integers) -> Integers:
    """Return the classes of samples; a regression counts as one class."""
    if dataset.task == "regression":
        return np.zeros(len(samples), np.int64)
    return np.asarray(dataset.y[samples], np.int64)


def _proportional(sizes: Integers, fraction: float, ties: Integers) -> Integers:
    """Return the number of test samples per class, at least one and not all; ties by `ties`.

    Rounding each class by itself would leave clients with many small classes almost untested.
    """
    if fraction == 0:
        return np.zeros_like(sizes)
    total = int(sizes.sum())
    return _apportion(sizes, min(max(round(total * fraction), 1), total - 1), ties)


def _apportion(weights: Integers, seats: int, ties: Integers) -> Integers:
    """Divide `seats` in proportion to `weights` by largest remainders, ties by rank in `ties`."""
    counts, remainders = np.divmod(weights * seats, int(weights.sum()))
    by_remainder = np.lexsort((ties, -remainders))
    counts[by_remainder[: seats - int(counts.sum())]] += 1
    return counts
