"""The client's side: a node that holds one client's data answers what the server asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from bfl_flower.wire import EVALUATE, FIT, HOLDS, Reply, Task, packed
from bflcore.engines.pool import Site, single_threaded
from bflcore.errors import BflError
from bflcore.messages import LocalResult
from bflcore.posteriors import Posterior

__all__ = ["Node", "Shelf"]

Memory = Mapping[str, Tensor]

ROUND = "round"  # what travels for a memory on the shelf: the number of rounds behind it


class Shelf:
    """A client's memories on its node's disk: those of its last `depth` rounds.

    Earlier ones are kept because the server may go back: to a round before the client's result
    was refused, or to its last checkpoint.
    """

    def __init__(self, folder: Path, depth: int = 2) -> None:
        self.folder = folder
        self.depth = depth

    def put(self, memory: Memory, round: int) -> dict[str, Tensor]:
        """Store a memory; return what travels for it."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".{round}.writing"
        save_file({name: tensor.contiguous().clone() for name, tensor in memory.items()}, aside)
        aside.replace(self._file(round))
        stored = sorted(self.folder.glob("*.safetensors"))
        past = [path for path in stored if path <= self._file(round)]
        for path in {*stored} - {*past[-self.depth :]}:  # a later one is of a run's lost end
            path.unlink()
        return {ROUND: torch.tensor(round)}

    def get(self, ticket: Memory) -> Memory:
        """Return the memory for which `ticket` travelled. Raises `BflError` if it is lost."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        number = int(ticket[ROUND])
        try:
            found: Memory = load_file(self._file(number), str(ticket[ROUND].device))
        except (OSError, SafetensorError) as error:
            raise BflError(
                f"its memory of round {number} is not in {self.folder} ({error})"
            ) from None
        return found

    def _file(self, round: int) -> Path:
        return self.folder / f"{round:06d}.safetensors"


@attrs.frozen(eq=False)
class Node:
    """One client's node; without a shelf its memories travel, for a server that keeps them."""

    client: int
    site: Site
    shelf: Shelf | None = None

    def answer(self, message: Message) -> Message:
        """Answer one message; what goes wrong in training is told, too."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind == HOLDS:
            return Message(packed({"client": self.client}), reply_to=message)
        with single_threaded():
            return Message(self._worked(kind, message), reply_to=message)

    def _worked(self, kind: str, message: Message) -> RecordDict:
        stage = FIT if kind == FIT else EVALUATE
        try:
            task = Task.unpacked(stage, message.content, self._family, self.site.problem.device)
            replies = self.site.run(task.stage_name, task.broadcast, self._at_work(task))
            return task.answer([self._kept(reply, task) for reply in replies])
        except BflError as error:
            return packed({"error": str(error)})

    def _at_work(self, task: Task) -> tuple[list[int], list[Memory]]:
        """Return the client with its memory."""
        if task.client != self.client:
            raise BflError(f"this node holds client {self.client}")
        memory = task.memory
        if not memory:
            memory = self.site.inference.initial_memory(self.site.problem)
        elif self.shelf:
            memory = self.shelf.get(memory)
        return [task.client], [memory]

    def _kept(self, reply: Reply, task: Task) -> Reply:
        """Put the memory of a result on the shelf."""
        if self.shelf is None or not isinstance(reply, LocalResult) or not reply.memory:
            return reply
        memory = {name: tensor[0] for name, tensor in reply.memory.items()}
        ticket = self.shelf.put(memory, task.broadcast.round + 1)
        return attrs.evolve(reply, memory={name: t[None] for name, t in ticket.items()})

    @property
    def _family(self) -> type[Posterior]:
        return type(self.site.inference.initial(self.site.problem))
