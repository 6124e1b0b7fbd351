"""Random streams: every draw has a generator of its own.

A generator is derived from ``(seed, round, client, purpose)``, so draws do not depend on the number
of workers, the chunk size, the engine or the order of arrival, and a resumed run continues bit for
bit. The global generators are never advanced.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np = lazy("numpy")

__all__ = ["SERVER", "numpy_stream", "seeded_globally", "stream"]

SERVER = -1  # the "client" of draws that belong to no client


def _sequence(seed: int, round: int, client: int, purpose: str) -> np.random.SeedSequence:
    # One is added because entropy words are unsigned and SERVER is -1.
    return np.random.SeedSequence([seed, round + 1, client + 1, zlib.crc32(purpose.encode())])


def numpy_stream(seed: int, round: int, client: int, purpose: str) -> np.random.Generator:
    """Return the numpy generator for ``(seed, round, client, purpose)``."""
    return np.random.default_rng(_sequence(seed, round, client, purpose))


def stream(
    seed: int, round: int, client: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return the torch generator for ``(seed, round, client, purpose)`` on `device`."""
    import torch

    generator = torch.Generator(device)
    state = _sequence(seed, round, client, purpose).generate_state(1, np.uint64)
    generator.manual_seed(int(state[0] >> np.uint64(1)))
    return generator


@contextmanager
def seeded_globally(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it afterwards.

    PyTorch initialises layers from the global generator and takes no other.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        state = _sequence(seed, SERVER, SERVER, purpose).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0] >> np.uint64(1)))
        yield
