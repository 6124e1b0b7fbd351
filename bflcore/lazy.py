"""Import a module when it is first used: importing torch takes over a second.

    if TYPE_CHECKING:
        import torch
    else:
        torch = lazy("torch")

Declarations and numerics can then share a module, and listings never wait for torch. A module that
subclasses one of torch's classes, or calls torch at import, imports it as usual.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["lazy"]


class _Lazy(ModuleType):
    """A module that is imported when one of its attributes is first looked up."""

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


def lazy(name: str) -> Any:
    """Return a stand-in for the module `name` that imports it when it is first used."""
    return _Lazy(name)
