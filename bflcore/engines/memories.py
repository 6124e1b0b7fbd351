"""Clients' memories: the most recently used in this process, the others in files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import UserDict, deque
from collections.abc import ItemsView, Iterator, Mapping
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import attrs
import zict
from safetensors.torch import load, save

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Memories", "Stored"]

Memory = Mapping[str, "Tensor"]


class Memories(UserDict[int, Memory]):
    """Memories by client, of which at most `limit` bytes stay in this process.

    A memory is the same object at every access until it is replaced, however often its tensors
    move to a file and back; they are read when they are used.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._store = _Store(limit)

    @property
    def folder(self) -> Path:
        """Where the files are; removed when no memory is held any more."""
        return self._store.folder

    def __setitem__(self, client: int, memory: Memory) -> None:
        """Store a memory in place of the client's last one."""
        if memory is not self.data.get(client):
            self.data[client] = self._store.put(memory)


@attrs.frozen(eq=False, weakref_slot=True)
class Stored(Mapping[str, "Tensor"]):
    """One memory in the store, where its tensors stay as long as this object is held."""

    _store: _Store
    _key: str
    _devices: Mapping[str, torch.device]  # by name of the tensor; files do not know them

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors ``[...]``, read once."""
        tensors = self._store.get(self._key)
        return {name: t.to(self._devices[name]) for name, t in tensors.items()}.items()

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""
        return dict(self.items())[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._devices)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._devices)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reach another process as plain tensors."""
        return dict, (dict(self.items()),)


class _Store:
    """Tensors by key, the least recently used in files; the run and its checkpoints share it."""

    def __init__(self, limit: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bfl-memories-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        files = zict.Func(_to_bytes, lambda read: load(bytes(read)), zict.File(self.folder))
        self._buffer: zict.Buffer[str, dict[str, Tensor]] = zict.Buffer(
            {}, files, limit, weight=_size
        )
        self._lock = Lock()  # zict releases its own locks while it reads a file
        self._keys = count()
        # A finaliser may run at any moment, also during an access: it only notes the key.
        self._unused: deque[str] = deque()

    def put(self, memory: Memory) -> Stored:
        """Store tensors for as long as the returned object is held."""
        key, tensors = str(next(self._keys)), dict(memory.items())
        with self._lock:
            self._remove_unused()
            self._buffer[key] = tensors
        stored = Stored(self, key, {name: tensor.device for name, tensor in tensors.items()})
        weakref.finalize(stored, self._unused.append, key)
        return stored

    def get(self, key: str) -> Memory:
        """Return stored tensors."""
        with self._lock:
            self._remove_unused()
            return self._buffer[key]

    def _remove_unused(self) -> None:
        while self._unused:
            del self._buffer[self._unused.popleft()]


def _to_bytes(memory: Memory) -> bytes:
    return save({name: tensor.contiguous().clone() for name, tensor in memory.items()})


def _size(_: str, memory: Memory) -> int:
    """Bytes that a memory takes."""
    return sum(tensor.nbytes for tensor in memory.values())
