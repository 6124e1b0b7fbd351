"""What a component shares with everybody else in its process, and must leave as it is."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import torch

__all__ = ["restored", "undisturbed"]

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # how to read it, and how to restore it

GLOBALS: dict[str, Setting] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch's anomaly detection": (
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    ),
    "torch's precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "numpy's global generator": (np.random.get_state, np.random.set_state),
    "Python's global generator": (random.getstate, random.setstate),
}


@contextmanager
def restored() -> Iterator[dict[str, Any]]:
    """Restore every global setting after the block; yields what they were."""
    before = {name: read() for name, (read, _) in GLOBALS.items()}
    try:
        yield before
    finally:
        for name, (_, restore) in GLOBALS.items():
            restore(before[name])


@contextmanager
def undisturbed(what: str) -> Iterator[None]:
    """Raise `AssertionError` if the block prints, or leaves a global setting changed.

    `what` is run there. Settings are restored either way.
    """
    printed = io.StringIO()
    with restored() as before:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield
        changed = [name for name, (read, _) in GLOBALS.items() if not _same(read(), before[name])]
    if printed.getvalue():
        text = " ".join(printed.getvalue().split())[:60]
        raise AssertionError(f"{what} prints {text!r}; return numbers, the program prints them")
    if changed:
        hint = "; draw from cohort.streams(...)" if "generator" in changed[0] else ""
        raise AssertionError(f"{what} changes {', '.join(changed)} for everybody{hint}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((one == other).all())
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    if isinstance(one, Mapping):
        return all(_same(one[name], other[name]) for name in one)
    return bool(one == other)
