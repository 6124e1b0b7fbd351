"""The client side: a node holds the data of one client and answers the server's requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from bfl_flower.wire import IDENTIFY, STAGES, SURVEY, Question, Task, TaskReply, pack
from bflcore.engines.client import ClientWorker
from bflcore.engines.pool import single_threaded
from bflcore.errors import BflError
from bflcore.files import replace_file
from bflcore.messages import Broadcast, LocalResult, Personalised
from bflcore.posteriors import Posterior

__all__ = ["MemoryStore", "Node"]

Memory = Mapping[str, Tensor]

ROUND = "round"  # key of a round token: the number of rounds before the memory was stored


class MemoryStore:
    """The memories of a client's last `depth` rounds, on the disk of its node.

    The server has a round token in place of each memory. Earlier memories are kept because the
    server may go back: to the round before a result that it rejected, or to its last checkpoint.
    """

    def __init__(self, folder: Path, depth: int = 2) -> None:
        self.folder = folder
        self.depth = depth

    def put(self, memory: Memory, round: int) -> dict[str, Tensor]:
        """Store a memory; return its token for the server."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().clone() for name, tensor in memory.items()}
        with replace_file(self._file(round)) as aside:
            save_file(tensors, aside)
        stored = sorted(self.folder.glob("*.safetensors"))
        past = [path for path in stored if path <= self._file(round)]
        for path in {*stored} - {
            *past[-self.depth :]
        }:  # later ones belong to rounds that the server lost
            path.unlink()
        return {ROUND: torch.tensor(round)}

    def get(self, token: Memory) -> Memory:
        """Return the memory of a round token. Raises `BflError` if it cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        number = int(token[ROUND])
        try:
            found: Memory = load_file(self._file(number), str(token[ROUND].device))
        except (OSError, SafetensorError) as error:
            raise BflError(
                f"its memory of round {number} is not in {self.folder} ({error})"
            ) from None
        return found

    def _file(self, round: int) -> Path:
        return self.folder / f"{round:06d}.safetensors"


@attrs.frozen(eq=False)
class Node:
    """The node of one client; without a store it sends memories to the server, which keeps them.

    With one, nothing personal is sent, and `keep` is called after the last round with the broadcast
    and what the client predicts with.
    """

    client: int
    worker: ClientWorker
    store: MemoryStore | None = None
    keep: Callable[[Broadcast, Personalised], object] | None = None

    def answer(self, message: Message) -> Message:
        """Answer a message; an error in training is also sent as an answer."""
        kind = message.metadata.message_type.removesuffix(".default")
        if kind == IDENTIFY:
            return Message(pack({"client": self.client}), reply_to=message)
        with single_threaded():
            return Message(self._work(kind, message), reply_to=message)

    def _work(self, kind: str, message: Message) -> RecordDict:
        device = self.worker.problem.device
        try:
            if kind == SURVEY:
                return self._survey(Question.unpack(message.content, device))
            task = Task.unpack(kind, message.content, self._family, device, self._first_prior)
            work: Any = getattr(self.worker, STAGES[kind])
            memory = self._load_memory(task)
            replies = work(task.broadcast, [task.client], [memory])
            replies = [r for r in replies if not self._kept(r, task.broadcast, memory)]
            return task.answer([self._store_memory(reply, task) for reply in replies])
        except BflError as error:
            return pack({"error": str(error)})

    def _survey(self, question: Question) -> RecordDict:
        self._check_client(question.client)
        (answer,) = self.worker.survey(question.known, [question.client])
        return question.answer(answer)

    def _check_client(self, client: int) -> None:
        if client != self.client:
            raise BflError(f"this node holds client {self.client}")

    def _load_memory(self, task: Task) -> Memory:
        """Return the client's memory."""
        self._check_client(task.client)
        if not task.memory:
            problem = self.worker.problem.surveyed(task.broadcast.survey)
            return self.worker.inference.initial_memory(problem)
        return self.store.get(task.memory) if self.store else task.memory

    def _store_memory(self, reply: TaskReply, task: Task) -> TaskReply:
        """Move the memory of a result to the store, if there is one."""
        if self.store is None or not isinstance(reply, LocalResult) or not reply.memory:
            return reply
        memory = {name: tensor[0] for name, tensor in reply.memory.items()}
        token = self.store.put(memory, task.broadcast.round + 1)
        return attrs.evolve(reply, memory={name: t[None] for name, t in token.items()})

    def _kept(self, reply: TaskReply, broadcast: Broadcast, memory: Memory) -> bool:
        """Keep the memory of a client that is ready to predict, if memories stay here."""
        if self.store is None or not isinstance(reply, Personalised):
            return False
        if self.keep:
            own = memory if reply.memory is None else reply.memory
            self.keep(broadcast, attrs.evolve(reply, memory=own))
        return True

    def _first_prior(self, survey: Mapping[str, Tensor]) -> Posterior:
        problem = self.worker.problem.surveyed(survey)
        return self.worker.inference.prior(problem).split(problem.layout)[0]

    @property
    def _family(self) -> type[Posterior]:
        return type(self.worker.inference.initial(self.worker.problem))
