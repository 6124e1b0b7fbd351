"""Checks of partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bflcore.data.base import Dataset, Integers
from bflcore.data.partition import Partitioner

__all__ = ["checks_of"]

Part = type[Partitioner]

CLIENTS, SAMPLES = 4, 240


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of a partition."""
    yield from (inputs_stay_untouched, every_client_gets_samples, nobody_shares_a_sample)
    yield depends_on_its_generator_alone


def inputs_stay_untouched(part: Part) -> None:
    """Assigning samples leaves the data as they were."""
    data, fresh = _data(), _data()
    part().assign(data, CLIENTS, np.random.default_rng(0))
    for name in ("x", "y", "client"):
        if not np.array_equal(getattr(data, name), getattr(fresh, name)):
            raise AssertionError(f"the data's {name} was changed in place")


def every_client_gets_samples(part: Part) -> None:
    """There is one share per client, and none is empty."""
    sizes = [len(share) for share in _shares(part)]
    if len(sizes) != CLIENTS or min(sizes) == 0:
        raise AssertionError(f"{CLIENTS} clients get shares of {sizes} samples; none may be empty")


def nobody_shares_a_sample(part: Part) -> None:
    """Each sample belongs to one client at most, and exists."""
    index = np.concatenate(_shares(part))
    if len(np.unique(index)) != len(index):
        raise AssertionError("a sample belongs to two clients")
    if index.min() < 0 or index.max() >= SAMPLES:
        raise AssertionError(f"samples {index.min()} to {index.max()} of {SAMPLES}")


def depends_on_its_generator_alone(part: Part) -> None:
    """The same generator gives the same shares, whatever numpy's global state is."""
    kept = np.random.get_state()  # noqa: NPY002 - what must not matter
    try:
        np.random.seed(1)  # noqa: NPY002
        first = _shares(part)
        np.random.seed(2)  # noqa: NPY002
        second = _shares(part)
    finally:
        np.random.set_state(kept)  # noqa: NPY002
    for one, other in zip(first, second, strict=True):
        if not np.array_equal(one, other):
            raise AssertionError("the same generator gives other shares; draw from `rng` alone")


def _shares(part: Part) -> list[Integers]:
    return part().assign(_data(), CLIENTS, np.random.default_rng(0))


def _data() -> Dataset:
    owners = np.arange(SAMPLES) % CLIENTS
    x = np.arange(SAMPLES, dtype=np.float32)[:, None]
    return Dataset("small", "classification", x, np.arange(SAMPLES) % 6, 6, owners)
