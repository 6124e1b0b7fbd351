"""The client side: a node holds the data of one client and answers the server's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from bfl_flower.identity import read_key, signed
from bfl_flower.limits import shown
from bfl_flower.wire import IDENTIFY, STAGES, SURVEY, Question, Task, TaskReply, pack, unpack
from bflcore.engines.client import ClientWorker
from bflcore.engines.pool import single_threaded
from bflcore.errors import BflError, ClientError
from bflcore.files import replace_file
from bflcore.messages import Broadcast, LocalResult, Personalised
from bflcore.posteriors import Posterior

__all__ = ["MemoryStore", "Node", "failure"]

Memory = Mapping[str, Tensor]

ROUND = "round"  # key of a round token: the number of rounds before the memory was stored


class MemoryStore:
    """The memories of a client's last `depth` rounds, on the disk of its node.

    The server has a round token in place of each memory. Earlier memories are kept because the
    server may go back: to the round before a result that it rejected, or to its last checkpoint.
    Later ones are kept, too: they are replaced when their round comes again, and a message of an
    early round that arrives once more must not delete them.
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
        for path in [path for path in stored if path <= self._file(round)][: -self.depth]:
            path.unlink()
        return {ROUND: torch.tensor(round)}

    def get(self, token: Memory) -> Memory:
        """Return the memory of a round token. Raises `BflError` if it cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if set(token) != {ROUND} or token[ROUND].numel() != 1:
            raise BflError("the server sent a memory, but this node keeps its own")
        number = int(token[ROUND])
        try:
            found: Memory = load_file(self._file(number), str(token[ROUND].device))
        except (OSError, SafetensorError) as error:
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
            raise BflError(
                f"its memory of round {number} cannot be read from {self._file(number).name} "
                f"({reason})"
            ) from None
        return found

    def _file(self, round: int) -> Path:
        return self.folder / f"{round:06d}.safetensors"


@attrs.frozen(eq=False)
class Node:
    """The node of one client; without a store it sends memories to the server, which keeps them.

    With one, nothing personal is sent, and `keep` is called after the last round with the broadcast
    and what the client predicts with. The folder of the store then holds the node's key, too.
    `private` are paths that are cut to their last name in whatever the node says.
    """

    client: int
    worker: ClientWorker
    store: MemoryStore | None = None
    keep: Callable[[Broadcast, Personalised], object] | None = None
    private: tuple[Path, ...] = ()

    def answer(self, message: Message) -> Message:
        """Answer a message; an error in training is also sent as an answer."""
        kind = message.metadata.message_type.removesuffix(".default")
        with single_threaded():
            return Message(self._work(kind, message), reply_to=message)

    def _work(self, kind: str, message: Message) -> RecordDict:
        device = self.worker.problem.device
        try:
            if kind == IDENTIFY:
                return pack(self._identity(message.content))
            if kind == SURVEY:
                return self._survey(Question.unpack(message.content, device))
            task = Task.unpack(kind, message.content, self._family, device, self._first_prior)
            work: Any = getattr(self.worker, STAGES[kind])
            memory = self._load_memory(task)
            replies = work(task.broadcast, [task.client], [memory])
            replies = [r for r in replies if not self._kept(r, task.broadcast, memory)]
            return task.answer([self._named(self._store_memory(r, task)) for r in replies])
        except BflError as error:
            return failure(str(error), self.private)

    def _identity(self, content: RecordDict) -> dict[str, Any]:
        """Return this node's client, signed where the node has a folder for its key."""
        found: dict[str, Any] = {"client": self.client}
        if self.store:
            number = str(unpack(content)[0].get("number", ""))
            found |= signed(read_key(self.store.folder), self.client, number)
        return found

    def _named(self, reply: TaskReply) -> TaskReply:
        """Leave the folders of this machine out of an error."""
        if isinstance(reply, ClientError):
            return ClientError(reply.client, reply.stage, shown(reply.reason, self.private))
        return reply

    def _survey(self, question: Question) -> RecordDict:
        self._check_client(question.client)
        (answer,) = self.worker.survey(question.known, [question.client])
        if isinstance(answer, ClientError):
            return failure(answer.reason, self.private)
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


def failure(reason: str, private: Iterable[Path] = ()) -> RecordDict:
    """Return the content of a reply that says why there is none, without folders."""
    return pack({"error": shown(reason, private)})
