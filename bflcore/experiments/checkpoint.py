"""Checkpoints: everything a run needs to continue bit for bit, as safetensors and JSON.

A checkpoint is ``checkpoint/000012.safetensors``: the server's tensors, and in the file's header
a JSON text with the counters and, for every client, the file that holds its memory. Memories that
changed since the last checkpoint are in ``000012.clients.safetensors``; the others stay in the
files of earlier rounds. Each file is written aside, synced and renamed, the checkpoint itself last,
so that the old checkpoint or the new one is complete, however the run ends. Every file has a digest
of its content, and a checkpoint those of the files that it needs. The last two are kept: if the
newest is damaged, the run continues from the one before.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from bflcore.errors import RunError, RunWarning
from bflcore.experiments.models import read_tensors, save_tensors
from bflcore.files import make_folder, sync, writing
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
    """The checkpoints of one run, of which the last two are kept.

    `run` is the run's digest: the checkpoints of another run are refused. Leaving the context waits
    until the last one is written.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self.folder = folder
        self.run = run
        self._latest: dict[int, Memory] = {}  # the memories that the files hold, by client
        self._files: dict[int, int] = {}  # client -> round of the file with its memory
        self._sizes: dict[int, int] = {}  # round of a file of memories -> how many it holds
        self._digests: dict[int, str] = {}  # round of a file of memories -> its digest
        self._needed: set[str] = set()  # the files of the last checkpoint
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
        return max(self._rounds(), default=None)

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
            "run": self.run,
            "round": broadcast.round,
            "memories": {str(client): number for client, number in sorted(self._files.items())},
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
        try:
            return self._read(self.reached, family, device)
        except RunError as error:
            run = shlex.quote(str(self.folder.parent))
            raise RunError(f"{error}; repair the run with: bfl resume {run}") from None

    def read_sound(self, family: type[Posterior], device: _Device = "cpu") -> Checkpoint | None:
        """Return the newest checkpoint that is not damaged, or None if there is none yet.

        Warns of a damaged one. Raises `RunError` if all are damaged.
        """
        damage: list[RunError] = []
        for number in sorted(self._rounds(), reverse=True):
            try:
                found = self._read(number, family, device)
            except RunError as error:
                damage.append(error)
                continue
            if damage:
                text = f"{damage[0]}; continuing from the checkpoint of round {number}"
                warnings.warn(text, RunWarning, stacklevel=2)
            return found
        if damage:
            raise RunError(f"{damage[0]}; start the run again")
        return None

    def sound(self) -> bool:
        """Return whether the newest checkpoint and the memories that it needs are undamaged."""
        try:
            self._verified(self.reached or 0, "cpu")
        except RunError:
            return False
        return True

    def _rounds(self) -> list[int]:
        names = (path.stem for path in self.folder.glob("*.safetensors"))
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, number: int, family: type[Posterior], device: _Device) -> Checkpoint:
        header, tensors, memories = self._verified(number, device)
        with _told(self.folder / _file_of(number)):
            self._files = {int(c): int(n) for c, n in header["memories"].items()}
            self._sizes = {int(n): int(size) for n, size in header["stored"].items()}
            self._digests = {int(n): digest for n, digest in header["digests"].items()}
            self._needed = _names(header)
            self._latest = {c: within(memories[n], f"{c}.") for c, n in self._files.items()}
            broadcast = Broadcast.unpack(int(header["round"]), tensors, family)
            return Checkpoint(broadcast, dict(self._latest), dict(header["state"]))

    def _verified(
        self, number: int, device: _Device
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[int, dict[str, Tensor]]]:
        """Return a checkpoint's header and tensors ``[...]``, and those of its files of memories.

        Raises `RunError` for a file that is damaged, of another run or of another round.
        """
        path = self.folder / _file_of(number)
        header, tensors, _ = read_tensors(path, device)
        with _told(path):
            if header["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {header['format']}")
            if (header["run"], header["round"]) != (self.run, number):
                raise ValueError("it is of another run or round")
            memories = {}
            for n in sorted(map(int, set(header["memories"].values()))):
                _, memories[n], digest = read_tensors(self.folder / _memories_of(n), device)
                if digest != header["digests"][str(n)]:
                    raise ValueError(f"{_memories_of(n)} is of another checkpoint")
        return header, tensors, memories

    def _commit(
        self,
        broadcast: Broadcast,
        changed: Mapping[int, Memory],
        header: dict[str, Any],
        after: Sequence[Path],
    ) -> None:
        make_folder(self.folder)
        number = broadcast.round
        if changed:
            tensors = {
                f"{client}.{name}": tensor
                for client, memory in sorted(changed.items())
                for name, tensor in memory.items()
            }
            self._digests[number] = save_tensors(self.folder / _memories_of(number), tensors, {})
        header["digests"] = {n: self._digests[int(n)] for n in header["stored"]}
        for path in after:
            with writing(path):
                sync(path)
        save_tensors(self.folder / _file_of(number), broadcast.pack(), header)
        before, self._needed = self._needed, _names(header)
        for path in self.folder.iterdir():
            if path.name not in before | self._needed:
                with writing(path):
                    path.unlink()

    def _wait(self) -> None:
        """Wait for the last checkpoint. Raises `WriteError` when it could not be written."""
        last, self._writing = self._writing, None
        if last:
            last.result()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what a wrong content causes into a `RunError` that names the file."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path} is not a checkpoint of this run ({type(error).__name__}: {error})"
        ) from None


def _names(header: Mapping[str, Any]) -> set[str]:
    """Return the names of the files of one checkpoint."""
    memories = (_memories_of(int(number)) for number in header["stored"])
    return {_file_of(int(header["round"])), *memories}


def _file_of(number: int) -> str:
    return f"{number:06d}.safetensors"


def _memories_of(number: int) -> str:
    return f"{number:06d}.clients.safetensors"
