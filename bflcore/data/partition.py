"""Partitions: each sample's client, and the samples that are held out for testing."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from bflcore.data.base import Dataset, Integers
from bflcore.data.split import deal, hold_out, split
from bflcore.errors import DataError
from bflcore.files import replace_file
from bflcore.lazy import lazy
from bflcore.options import Component, component, option
from bflcore.randomness import SERVER, numpy_stream

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = [
    "PARTITIONERS",
    "Partition",
    "Partitioner",
    "divide",
    "hold_back",
    "split_off",
]


class Partitioner(Component, abc.ABC):
    """Base of partitions that ``--partition NAME:VALUE`` finds."""

    kind: ClassVar[str] = "partition"
    by_owner: ClassVar[bool] = False  # each client is one natural owner

    @abc.abstractmethod
    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Return the sample indices of each client: disjoint, and a function of `rng` alone."""


@component
class IID(Partitioner):
    """Divide the samples at random into equal parts."""

    name = "iid"

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Cut a permutation into equal parts."""
        return np.array_split(rng.permutation(len(dataset.x)), clients)


@component
class Labels(Partitioner):
    """Give each client k classes; the samples of a class are shared evenly among its holders.

    Client i takes classes (i k + j) mod C for j < k; with ``random``, k classes drawn at random.
    Samples of a class that no client holds are left out.
    """

    name = "labels"
    reference = "Chen et al. 2023 (BPFed), section on data"

    k: int = option(2, "classes per client", at_least=1)
    random: bool = option(False, "draw the classes at random instead of taking them in turn")

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Divide each class among its holders."""
        y = _class_labels(dataset, self.name)
        if self.k > dataset.classes:
            raise DataError(
                f"--partition: labels:{self.k} asks for more classes than the data has; "
                f"allowed: at most {dataset.classes}"
            )
        held = [
            rng.choice(dataset.classes, self.k, replace=False)
            if self.random
            else (i * self.k + np.arange(self.k)) % dataset.classes
            for i in range(clients)
        ]
        parts: list[list[Integers]] = [[] for _ in range(clients)]
        for c in range(dataset.classes):
            holders = [i for i in range(clients) if c in held[i]]
            samples = rng.permutation(np.flatnonzero(y == c))
            if holders:
                for i, share in zip(holders, np.array_split(samples, len(holders)), strict=True):
                    parts[i].append(share)
        return [np.concatenate(part) for part in parts]


@component
class Shards(Partitioner):
    """Sort by label, cut into clients x k shards, and deal k to each client (pathological)."""

    name = "shards"
    reference = "McMahan et al. 2017, section 3"

    k: int = option(2, "shards per client", at_least=1)

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Deal the shards."""
        y = _class_labels(dataset, self.name)
        order = rng.permutation(len(y))
        order = order[np.argsort(y[order], kind="stable")]
        shards = np.array_split(order, clients * self.k)
        dealt = rng.permutation(len(shards)).reshape(clients, self.k)
        return [np.concatenate([shards[i] for i in hand]) for hand in dealt]


@component
class Dirichlet(Partitioner):
    """Divide each class among clients by proportions drawn from Dirichlet(a).

    Every client gets at least `minimum` samples (fewer if the data does not suffice): the largest
    clients give some of theirs away.
    """

    name = "dirichlet"
    reference = "Hsu et al. 2019, section 3.1"

    a: float = option(0.5, "concentration parameter (smaller is more uneven)", above=0)
    minimum: int = option(10, "minimum number of samples per client", at_least=1)

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Divide class by class."""
        y = _class_labels(dataset, self.name)
        parts: list[list[Integers]] = [[] for _ in range(clients)]
        for c in range(dataset.classes):
            samples = rng.permutation(np.flatnonzero(y == c))
            for i, share in enumerate(_cut(samples, _proportions(self.a, clients, rng))):
                parts[i].append(share)
        mixed = [rng.permutation(np.concatenate(part)) for part in parts]
        return _at_least(mixed, self.minimum)


@component
class Quantity(Partitioner):
    """Give clients numbers of samples drawn from Dirichlet(a), regardless of labels."""

    name = "quantity"
    reference = "Li et al. 2022 (NIID-Bench), section IV-C"

    a: float = option(0.5, "concentration parameter (smaller is more uneven)", above=0)
    minimum: int = option(10, "minimum number of samples per client", at_least=1)

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Cut a permutation by the drawn proportions."""
        order = rng.permutation(len(dataset.x))
        return _at_least(_cut(order, _proportions(self.a, clients, rng)), self.minimum)


@component
class Natural(Partitioner):
    """Give each client the samples of one natural owner, beginning with the smallest owner id."""

    name = "natural"
    by_owner = True

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Group by owner."""
        if dataset.client is None:
            raise DataError(
                f"--partition: natural needs data with owners, but {dataset.name} has none "
                "(--client names their column in a table); allowed: iid, labels, shards, "
                "dirichlet, quantity"
            )
        owners = np.unique(dataset.client)
        if clients > len(owners):
            raise DataError(
                f"--clients: {clients} exceeds the {len(owners)} owners of {dataset.name}; "
                f"allowed: at most {len(owners)}"
            )
        return [np.flatnonzero(dataset.client == owner) for owner in owners[:clients]]


KINDS = ("train", "test", "validation", "calibration")  # what a client's samples are for

PARTITIONERS: tuple[type[Partitioner], ...] = (IID, Labels, Shards, Dirichlet, Quantity, Natural)


@attrs.frozen(eq=False)
class Partition:
    """Sample indices of every client; `test` indexes ``x_test`` if `held_out`, else ``x``.

    `validation` and `calibration` index ``x``; without such a split they are ``()``.
    """

    train: tuple[Integers, ...]
    test: tuple[Integers, ...]
    held_out: bool = False
    validation: tuple[Integers, ...] = ()
    calibration: tuple[Integers, ...] = ()

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    def save(self, path: Path) -> None:
        """Write an ``.npz`` of plain integer arrays. Raises `WriteError`."""
        arrays: dict[str, Any] = {"held_out": np.array(self.held_out)}
        for name in KINDS:
            parts = getattr(self, name)
            if not parts:
                continue
            arrays[name] = np.concatenate(parts)
            arrays[f"{name}_sizes"] = np.array([len(part) for part in parts])
        with replace_file(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Partition:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            parts = {
                name: tuple(np.split(file[name], file[f"{name}_sizes"].cumsum()[:-1]))
                for name in KINDS
                if name in file
            }
            return cls(**parts, held_out=bool(file["held_out"]))


def divide(
    dataset: Dataset,
    partitioner: Partitioner,
    clients: int,
    rng: np.random.Generator,
    *,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    test_fraction: float = 0.2,
) -> Partition:
    """Assign samples to clients and divide each client's share into training and test samples.

    Samples are divided class by class; a regression counts as one class.

    * With `train_per_class`: that many samples per class for training, the rest (at most
      `test_per_class` per class) for testing.
    * With `test_per_class` alone: that many per class for testing, but at most half of the class;
      the rest for training.
    * With neither: `test_fraction` of the client's samples for testing, in proportion to its
      classes.

    Without `train_per_class`, a client with two samples or more tests on at least one. If the data
    has a held-out test split, clients train on their whole share (at most `train_per_class` per
    class), and `deal` gives each held-out sample to one of them. Raises `DataError` if a client
    would have no training samples.
    """
    if clients < 1:
        raise DataError(f"--clients: {clients} is not allowed; allowed: 1 to {len(dataset.x)}")
    if clients > len(dataset.x):
        raise DataError(
            f"--clients: {clients} exceeds the {len(dataset.x)} samples of {dataset.name}; "
            f"allowed: at most {len(dataset.x)}"
        )
    if train_per_class is not None and train_per_class < 1:
        raise DataError(f"--train-per-class: {train_per_class} is not allowed; allowed: at least 1")
    shares = partitioner.assign(dataset, clients, rng)
    held_out = dataset.x_test is not None
    train, test = [], []
    for client, share in enumerate(shares):
        if len(share) == 0:
            raise DataError(
                f"--partition: {partitioner.name} leaves client {client} without samples; "
                "use fewer --clients or another partition"
            )
        fraction = 0.0 if held_out else test_fraction
        cap = 0 if held_out else test_per_class
        mine, theirs = split(dataset, share, rng, train_per_class, cap, fraction)
        train.append(mine)
        test.append(theirs)
    if held_out:
        test = deal(dataset, train, rng, by_owner=partitioner.by_owner)
    return Partition(tuple(train), tuple(test), held_out)


def hold_back(
    dataset: Dataset,
    partition: Partition,
    seed: int,
    *,
    validation: float = 0.0,
    calibration: float = 0.0,
) -> Partition:
    """Hold fractions of each client's training samples out: first validation, then calibration.

    Which ones depends on the client's training samples, its number and `seed` alone.
    """
    for purpose, fraction in (("validation", validation), ("calibration", calibration)):
        if fraction:
            splits = [
                split_off(dataset, samples, fraction, seed, client, purpose)
                for client, samples in enumerate(partition.train)
            ]
            train, kept = zip(*splits, strict=True)
            parts: dict[str, Any] = {"train": train, purpose: kept}
            partition = attrs.evolve(partition, **parts)
    return partition


def split_off(
    dataset: Dataset, train: Integers, fraction: float, seed: int, client: int, purpose: str
) -> tuple[Integers, Integers]:
    """Divide one client's training samples; see `hold_out`.

    Samples for calibration are drawn regardless of their class: what calibration promises rests on
    their being exchangeable with new samples.
    """
    draws = numpy_stream(seed, SERVER, client, f"{purpose} split")
    return hold_out(dataset, train, fraction, draws, by_class=purpose == "validation")


def _class_labels(dataset: Dataset, partition: str) -> Integers:
    if dataset.task != "classification":
        raise DataError(
            f"--partition: {partition} needs class labels, but {dataset.name} is a regression; "
            "allowed: iid, quantity, natural"
        )
    return np.asarray(dataset.y, np.int64)


def _proportions(a: float, clients: int, rng: np.random.Generator) -> Any:
    """Draw from Dirichlet(a); if all gammas underflow (tiny `a`), one client gets everything."""
    gammas = rng.gamma(a, size=clients)
    if gammas.sum() == 0:
        gammas[rng.integers(clients)] = 1
    return gammas / gammas.sum()


def _cut(samples: Integers, proportions: Any) -> list[Integers]:
    cuts = np.floor(np.cumsum(proportions)[:-1] * len(samples) + 0.5).astype(int)
    return np.split(samples, cuts)


def _at_least(parts: Sequence[Integers], minimum: int) -> list[Integers]:
    """Move samples from the largest clients to those below `minimum` (at most the mean size)."""
    sizes = np.array([len(part) for part in parts])
    floor = min(minimum, int(sizes.sum()) // len(parts))
    given: list[list[Integers]] = [[] for _ in parts]
    kept = sizes.copy()
    for poor in np.flatnonzero(sizes < floor):
        while sizes[poor] < floor:
            rich = int(kept.argmax())
            count = min(floor - sizes[poor], kept[rich] - floor)
            given[poor].append(parts[rich][kept[rich] - count : kept[rich]])
            kept[rich] -= count
            sizes[poor] += count
    return [
        np.concatenate([part[:keep], *gifts])
        for part, keep, gifts in zip(parts, kept, given, strict=True)
    ]
