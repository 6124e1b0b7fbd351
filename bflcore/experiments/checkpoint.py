"""Checkpoints: everything a run needs to continue bit for bit, as safetensors and JSON.

A checkpoint is ``checkpoint/000012.safetensors``: the server's tensors, and in the file's header
a JSON text with the counters and, for every client, the file that holds its memory. Memories that
changed since the last checkpoint are in ``000012.clients.safetensors``; the others stay in the
files of earlier rounds. Each file is written aside, synced and renamed, the checkpoint itself last,
so that the old checkpoint or the new one is complete, however the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
from safetensors import SafetensorError

from bflcore.errors import RunError
from bflcore.experiments.models import read_tensors, save_tensors
from bflcore.files import sync
from bflcore.messages import Broadcast, within

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.posteriors import Posterior

    _Device = torch.device | str

__all__ = ["Checkpoint", "Checkpoints"]

FORMAT = 1

Memory = Mapping[str, "Tensor"]


@attrs.frozen(eq=False)
class Checkpoint:
    """What one checkpoint holds: the server's state, the memories, the run's counters."""

    broadcast: Broadcast
    memories: dict[int, Memory]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, of which the newest is kept.

    Leaving the context waits until the last one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._latest: dict[int, Memory] = {}  # the memories that the files hold, by client
        self._files: dict[int, int] = {}  # client -> round of the file with its memory
        self._sizes: dict[int, int] = {}  # round of a file of memories -> how many it holds
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait()
        finally:
            self._writer.shutdown()

    @property
    def reached(self) -> int | None:
        """Rounds completed at the newest checkpoint, or None."""
        names = (path.stem for path in self.folder.glob("*.safetensors"))
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def write(
        self,
        broadcast: Broadcast,
        memories: Mapping[int, Memory],
        state: Mapping[str, Any],
        after: Sequence[Path] = (),
    ) -> None:
        """Write a checkpoint while the run continues; the files `after` reach the disk before it.

        A memory counts as changed if it is not the same object as at the last checkpoint. If more
        than half of what the files hold is out of date, all memories are written again.
        """
        self._wait()
        changed = {c: m for c, m in memories.items() if self._latest.get(c) is not m}
        if sum(self._sizes.values()) + len(changed) > 2 * len(memories):
            changed = dict(memories)
        self._latest = dict(memories)
        self._files |= dict.fromkeys(changed, broadcast.round)
        live, sizes = set(self._files.values()), self._sizes | {broadcast.round: len(changed)}
        self._sizes = {number: size for number, size in sizes.items() if number in live}
        header = {
            "format": FORMAT,
            "round": broadcast.round,
            "memories": {str(client): number for client, number in sorted(self._files.items())},
            "names": {str(client): sorted(memory) for client, memory in memories.items()},
            "stored": {str(number): size for number, size in sorted(self._sizes.items())},
            "state": dict(state),
        }
        self._writing = self._writer.submit(self._commit, broadcast, changed, header, after)

    def read(self, family: type[Posterior], device: _Device = "cpu") -> Checkpoint | None:
        """Return the newest checkpoint, or None if there is none yet.

        `write` then knows which memories the files hold. Raises `RunError` for a file that is
        damaged or is not a checkpoint of this run.
        """
        if self.reached is None:
            return None
        newest = self.folder / _file_of(self.reached)
        try:
            return self._rebuild(newest, family, device)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{newest} is not a checkpoint of this run ({type(error).__name__}: {error}); "
                "start the run again"
            ) from None

    def _rebuild(self, path: Path, family: type[Posterior], device: _Device) -> Checkpoint:
        header, tensors = self._load(path, device)
        if header["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {header['format']}")
        self._files = {int(client): int(number) for client, number in header["memories"].items()}
        self._sizes = {int(number): int(size) for number, size in header["stored"].items()}
        numbers = set(self._files.values())
        files = {n: self._load(self.folder / _memories_of(n), device)[1] for n in numbers}
        self._latest = {c: within(files[n], f"{c}.") for c, n in self._files.items()}
        for client, memory in self._latest.items():
            if sorted(memory) != header["names"][str(client)]:
                raise ValueError(f"the memory of client {client} is incomplete")
        broadcast = Broadcast.unpack(int(header["round"]), tensors, family)
        return Checkpoint(broadcast, dict(self._latest), dict(header["state"]))

    def _load(self, path: Path, device: _Device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            return read_tensors(path, device)
        except RunError as error:
            raise RunError(f"{error}; start the run again") from None

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
            save_tensors(self.folder / _memories_of(number), tensors, {})
        for path in after:
            sync(path)
        save_tensors(self.folder / _file_of(number), broadcast.pack(), header)
        live = {_file_of(number), *(_memories_of(int(n)) for n in header["stored"])}
        for path in self.folder.iterdir():
            if path.name not in live:
                path.unlink()

    def _wait(self) -> None:
        """Wait for the last checkpoint. Raises `RunError` when it could not be written."""
        writing, self._writing = self._writing, None
        try:
            if writing:
                writing.result()
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{self.folder}: the checkpoint cannot be written ({error}); "
                "free disk space and resume"
            ) from None


def _file_of(number: int) -> str:
    return f"{number:06d}.safetensors"


def _memories_of(number: int) -> str:
    return f"{number:06d}.clients.safetensors"
