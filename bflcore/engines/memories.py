"""Clients' memories: in this process up to a limit, beyond it in files, read when needed."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Memories"]

Memory = Mapping[str, "Tensor"]


class Memories(MutableMapping[int, Memory]):
    """Memories by client; about `limit` bytes of them stay in this process."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._memories: dict[int, Memory] = {}
        self._held = 0
        self._numbers = count()
        self.folder: Path | None = None  # made when needed, removed with this object

    def __getitem__(self, client: int) -> Memory:
        """Return a client's memory; one in a file is read at every access to a tensor."""
        return self._memories[client]

    def __setitem__(self, client: int, memory: Memory) -> None:
        """Store a memory in place of the client's last one."""
        self._held -= _size(self._memories.get(client, {}))
        size = _size(memory)
        if self._held + size <= self._limit:
            self._memories[client] = memory
            self._held += size
        else:
            self._memories[client] = self._stored(memory)

    def __delitem__(self, client: int) -> None:
        """Forget a memory."""
        self._held -= _size(self._memories.pop(client))

    def __iter__(self) -> Iterator[int]:
        """Iterate over the clients."""
        return iter(self._memories)

    def __len__(self) -> int:
        """Count the clients that have a memory."""
        return len(self._memories)

    def _stored(self, memory: Memory) -> Stored:
        from safetensors.torch import save_file

        if isinstance(memory, Stored):
            return memory
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="bfl-memories-"))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        path = self.folder / f"{next(self._numbers)}.safetensors"
        device = next((str(tensor.device) for tensor in memory.values()), "cpu")
        save_file({name: tensor.contiguous().clone() for name, tensor in memory.items()}, path)
        stored = Stored(path, device)
        weakref.finalize(stored, path.unlink, missing_ok=True)  # copies elsewhere only read
        return stored


class Stored(Mapping[str, "Tensor"]):
    """A memory in a file. What is sent to another process is where it lies."""

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._device = path, device

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor."""
        from safetensors import safe_open

        with safe_open(self._path, "pt", self._device) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        from safetensors import safe_open

        with safe_open(self._path, "pt") as file:
            return iter(list(file.keys()))

    def __len__(self) -> int:
        """Count the tensors."""
        return sum(1 for _ in self)


def _size(memory: Memory) -> int:
    """Bytes that a memory takes in this process."""
    return 0 if isinstance(memory, Stored) else sum(tensor.nbytes for tensor in memory.values())
