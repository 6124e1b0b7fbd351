"""Clients' memories: the most recently used in this process, the others in files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import UserDict, deque
from collections.abc import ItemsView, Iterator, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import attrs
import zict
from safetensors.torch import load, save

from bflcore.files import make_folder, writing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Memories", "Stored"]

Memory = Mapping[str, "Tensor"]


class Memories(UserDict[int, Memory]):
    """Memories by client, of which at most `limit` bytes stay in this process.

    A memory is the same object at every access until it is replaced, however often its tensors
    move to a file and back; they are read when they are used. Raises `WriteError` where a file
    cannot be written.
    """

    def __init__(self, limit: float, folder: Path | None = None) -> None:
        super().__init__()
        self._store = _Store(limit, folder)

    @property
    def folder(self) -> Path:
        """Where the files are; removed when no memory is held any more (default: a new folder)."""
        return self._store.folder

    def use_folder(self, folder: Path) -> None:
        """Choose where the files are, before the first memory is stored."""
        self._store.chosen = folder

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

    def __init__(self, limit: float, folder: Path | None) -> None:
        self.limit, self.chosen = limit, folder
        self._lock = Lock()  # zict releases its own locks while it reads a file
        self._keys = count()
        # A finaliser may run at any moment, also during an access: it only notes the key.
        self._unused: deque[str] = deque()

    @cached_property
    def folder(self) -> Path:
        """A new folder, removed with this object; others may have theirs in the chosen one."""
        if self.chosen:
            make_folder(self.chosen, parents=True)
        with writing(self.chosen or Path(tempfile.gettempdir())):
            found = Path(tempfile.mkdtemp(prefix="bfl-memories-", dir=self.chosen))
        weakref.finalize(self, shutil.rmtree, found, ignore_errors=True)
        return found

    @cached_property
    def _buffer(self) -> zict.Buffer[str, dict[str, Tensor]]:
        files = zict.Func(_to_bytes, lambda read: load(bytes(read)), zict.File(self.folder))
        return zict.Buffer({}, files, self.limit, weight=_size)

    def put(self, memory: Memory) -> Stored:
        """Store tensors for as long as the returned object is held."""
        key, tensors = str(next(self._keys)), dict(memory.items())
        with self._lock, writing(self.folder):
            self._remove_unused()
            self._buffer[key] = tensors
        stored = Stored(self, key, {name: tensor.device for name, tensor in tensors.items()})
        weakref.finalize(stored, self._unused.append, key)
        return stored

    def get(self, key: str) -> Memory:
        """Return stored tensors."""
        with self._lock, writing(self.folder):  # another memory may have to make room
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
