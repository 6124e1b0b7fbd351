"""Checkpoints: everything that a run needs to go on bit for bit, as safetensors and JSON.

A checkpoint is ``checkpoint/000012.safetensors``: the server's tensors, and in the file's header
a JSON text with the counters and the whereabouts of every client's memory. Memories lie beside
it in ``000012.clients.safetensors``, those alone that changed since the last checkpoint; the
others stay in the files of earlier rounds. A file is written aside, synced and renamed, the
checkpoint itself last, so that whatever ends a run leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from bflcore.errors import RunError
from bflcore.messages import Broadcast, within

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.posteriors import Posterior

__all__ = ["Checkpoint", "Checkpoints"]

FORMAT = 1
HEADER = "bflcore"  # key of the JSON text among a file's metadata

Memory = Mapping[str, "Tensor"]


@attrs.frozen(eq=False)
class Checkpoint:
    """What one checkpoint holds: the server's state, the memories, the run's counters."""

    broadcast: Broadcast
    memories: dict[int, Memory]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; the newest is kept.

    Leaving the context waits for what is still being written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[int, Memory] = {}  # what the files hold, by client
        self._where: dict[int, int] = {}  # client -> round of the file with its memory
        self._stored: dict[int, int] = {}  # round of a file of memories -> how many it holds
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._wait()
        finally:
            self._writer.shutdown()

    @property
    def reached(self) -> int | None:
        """The number of rounds that the newest checkpoint has behind it; None: there is none."""
        names = (path.stem for path in self.folder.glob("*.safetensors"))
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def write(
        self,
        broadcast: Broadcast,
        memories: Mapping[int, Memory],
        state: Mapping[str, Any],
        after: Sequence[Path] = (),
    ) -> None:
        """Write a checkpoint while the run goes on; the files `after` reach the disk before it.

        A memory counts as changed when it is another object than at the last checkpoint. When
        more than half of what the files hold is out of date, all are written anew.
        """
        self._wait()
        changed = {c: m for c, m in memories.items() if self._written.get(c) is not m}
        if sum(self._stored.values()) + len(changed) > 2 * len(memories):
            changed = dict(memories)
        self._written = dict(memories)
        self._where |= dict.fromkeys(changed, broadcast.round)
        live = set(self._where.values())
        stored = self._stored | ({broadcast.round: len(changed)} if changed else {})
        self._stored = {number: size for number, size in stored.items() if number in live}
        header = {
            "format": FORMAT,
            "round": broadcast.round,
            "memories": {str(client): number for client, number in sorted(self._where.items())},
            "names": {str(client): sorted(memory) for client, memory in memories.items()},
            "stored": {str(number): size for number, size in sorted(self._stored.items())},
            "state": dict(state),
        }
        self._writing = self._writer.submit(self._commit, broadcast, changed, header, after)

    def read(
        self, family: type[Posterior], device: torch.device | str = "cpu"
    ) -> Checkpoint | None:
        """Return the newest checkpoint, None where there is none yet.

        `write` then knows which memories are in its files. Raises `RunError` for a file that is
        damaged or none of ours.
        """
        if self.reached is None:
            return None
        newest = self.folder / _file_of(self.reached)
        header, tensors = self._load(newest, device)
        try:
            checkpoint = self._rebuilt(header, tensors, family, device)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{newest} is no checkpoint of this run ({type(error).__name__}: {error}); "
                "run it again"
            ) from None
        self._written = dict(checkpoint.memories)
        return checkpoint

    def _rebuilt(
        self,
        header: dict[str, Any],
        tensors: dict[str, Tensor],
        family: type[Posterior],
        device: torch.device | str,
    ) -> Checkpoint:
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}, not {FORMAT}")
        self._where = {int(client): int(number) for client, number in header["memories"].items()}
        self._stored = {int(number): int(size) for number, size in header["stored"].items()}
        files = {
            number: self._load(self.folder / _memories_of(number), device)[1]
            for number in set(self._where.values())
        }
        memories: dict[int, Memory] = {
            client: within(files[number], f"{client}.") for client, number in self._where.items()
        }
        for client, memory in memories.items():
            if sorted(memory) != header["names"][str(client)]:
                raise ValueError(f"the memory of client {client} is not what was written")
        broadcast = Broadcast.unpack(int(header["round"]), tensors, family)
        return Checkpoint(broadcast, memories, dict(header["state"]))

    def _load(
        self, path: Path, device: torch.device | str
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
                return header, {key: file.get_tensor(key).to(device) for key in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(
                f"{path} cannot be read ({type(error).__name__}: {error}); run it again"
            ) from None

    def _commit(
        self,
        broadcast: Broadcast,
        changed: Mapping[int, Memory],
        header: Mapping[str, Any],
        after: Sequence[Path],
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        number = broadcast.round
        if changed:
            tensors = {
                f"{client}.{name}": tensor
                for client, memory in sorted(changed.items())
                for name, tensor in memory.items()
            }
            self._save(_memories_of(number), tensors, {})
        for path in after:
            _sync(path)
        self._save(_file_of(number), broadcast.pack(), {HEADER: json.dumps(header)})
        live = {_file_of(number), *(_memories_of(int(n)) for n in header["stored"])}
        for path in self.folder.iterdir():
            if path.name not in live:
                path.unlink()

    def _save(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        from safetensors.torch import save_file

        aside = self.folder / f".{name}.writing"
        whole = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
        save_file({key: tensor.contiguous() for key, tensor in whole.items()}, aside, metadata)
        _sync(aside)
        aside.replace(self.folder / name)
        _sync(self.folder)

    def _wait(self) -> None:
        """Wait for the last checkpoint. Raises `RunError` when it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        from safetensors import SafetensorError

        try:
            writing.result()
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{self.folder}: the checkpoint cannot be written ({error}); make room and resume"
            ) from None


def _file_of(number: int) -> str:
    return f"{number:06d}.safetensors"


def _memories_of(number: int) -> str:
    return f"{number:06d}.clients.safetensors"


def _sync(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
