"""Importing torchvision beside a CPU build of torch.

The torchvision wheel of the package index is built for CUDA. Beside a CPU-only torch its compiled
operators do not load, and ``import torchvision`` then fails because it registers gradients and
shapes for operators that nobody declared. Declaring their schemas first is enough for data sets,
transforms and models, none of which call them.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from bflcore.errors import DataError

__all__ = ["torchvision"]

MISSING = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def torchvision() -> ModuleType:
    """Import torchvision. Raises `DataError` when it is not installed."""
    try:
        return _import()
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed: pip install 'bflcore[data]'") from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _declare()
    return _import()


def _import() -> ModuleType:
    import torchvision.datasets
    import torchvision.models

    return torchvision  # type: ignore[no-any-return]


def _declare() -> None:
    import sys

    from torch import library

    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    for name in MISSING:
        with contextlib.suppress(RuntimeError):  # the real operator is there after all
            library.define(f"torchvision::{name}", SCHEMA)
