"""The server side: clients as nodes of a Flower grid."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from bfl_flower.wire import (
    CALIBRATE,
    EVALUATE,
    FIT,
    IDENTIFY,
    PERSONALISE,
    SURVEY,
    MalformedError,
    Question,
    Reply,
    Task,
    pack,
    unpack,
)
from bflcore.engines.base import Session
from bflcore.errors import ClientError, RoundError
from bflcore.messages import Answer, Evaluation, Personalised

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import Broadcast, LocalResult
    from bflcore.posteriors import Posterior

__all__ = ["GridSession"]

PAUSE = 0.02  # seconds between two polls for replies
IDENTIFY_TIMEOUT = 60.0  # seconds until a new node must report its client


class GridSession(Session):
    """Clients on a grid whose nodes each hold the data of one client and report its number.

    The server stores what nodes send as memories: the memories themselves in a simulation, round
    tokens if the memories stay on the nodes.
    """

    def __init__(
        self, grid: Grid, family: type[Posterior], clients: Sequence[int], timeout: float = 0
    ) -> None:
        self._grid = grid
        self._family = family
        self._clients = frozenset(clients)
        self._timeout = timeout
        self._nodes: dict[int, int] = {}  # client -> node
        self._known: set[int] = set()  # nodes that reported their client
        self._memories: dict[int, Mapping[str, Tensor]] = {}

    @property
    def memories(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The clients' memories, or their round tokens."""
        return self._memories

    def restore(self, memories: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore what an earlier session stored."""
        self._memories = dict(memories)

    def wait_for(self, count: int, seconds: float) -> list[int]:
        """Wait until `count` clients' nodes are connected; return the connected clients.

        Raises `RoundError` if they do not connect in time.
        """
        end = time.monotonic() + seconds
        while len(self._update_registry()) < count:
            if time.monotonic() > end:
                raise RoundError(
                    f"{len(self._nodes)} of {count} clients' nodes connected within {seconds:g} s; "
                    "start the others, or wait longer"
                )
            time.sleep(10 * PAUSE)
        return sorted(self._nodes)

    def survey(
        self, known: Mapping[str, Tensor], clients: Sequence[int]
    ) -> Iterator[Answer | ClientError]:
        """Ask every client's node for sums over its data; see `Session.survey`."""
        questions = {client: Question(client, known) for client in clients}
        return cast("Iterator[Answer | ClientError]", self._ask(SURVEY, questions, "survey"))

    def fit(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[LocalResult | ClientError]:
        """Ask every client's node to fit; see `Session.fit`."""
        replies = self._ask(FIT, *self._tasks(FIT, broadcast, clients))
        return cast("Iterator[LocalResult | ClientError]", replies)

    def store(self, result: LocalResult) -> None:
        """Store what the nodes sent as their memories."""
        for row, client in enumerate(result.clients):
            self._memories[client] = {name: t[row] for name, t in result.memory.items()}

    def evaluate(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[Evaluation | ClientError]:
        """Ask every client's node to evaluate; see `Session.evaluate`."""
        replies = self._ask(EVALUATE, *self._tasks(EVALUATE, broadcast, clients))
        return cast("Iterator[Evaluation | ClientError]", replies)

    def personalise(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[Personalised | ClientError]:
        """Let every client's node prepare its model; those of nodes with a disk stay there."""
        replies = self._ask(PERSONALISE, *self._tasks(PERSONALISE, broadcast, clients))
        return cast("Iterator[Personalised | ClientError]", replies)

    def calibrate(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[Answer | ClientError]:
        """Ask nodes for sums over their calibration samples; see `Session.calibrate`."""
        replies = self._ask(CALIBRATE, *self._tasks(CALIBRATE, broadcast, clients))
        return cast("Iterator[Answer | ClientError]", replies)

    def _tasks(
        self, stage: str, broadcast: Broadcast, clients: Sequence[int]
    ) -> tuple[dict[int, Task], str]:
        """Return every client's task, and the group of messages that they belong to."""
        tasks = {c: Task(stage, c, broadcast, self._memories.get(c, {})) for c in clients}
        return tasks, str(broadcast.round)

    def _ask(self, kind: str, tasks: Mapping[int, Task | Question], group: str) -> Iterator[Reply]:
        """Send every client its task; yield the answers in the order of the tasks."""
        nodes = self._update_registry()
        sent = {
            client: self._send(task.pack(), nodes[client], kind, group)
            for client, task in tasks.items()
            if client in nodes
        }
        waiting = {number: client for client, number in sent.items() if number}
        end = time.monotonic() + self._timeout if self._timeout else None
        arriving = self._replies(set(waiting), end)
        arrived: dict[int, Message] = {}
        for client, task in tasks.items():
            while client in waiting.values() and client not in arrived:
                message = next(arriving, None)
                if message is None:
                    break
                arrived[waiting[message.metadata.reply_to_message_id]] = message
            reply = arrived.pop(client, None)
            if reply is not None and not reply.has_error():
                yield from task.read(reply.content)
            else:
                yield ClientError(client, task.stage_name, self._reason(client, reply, nodes))

    def _reason(self, client: int, reply: Message | None, nodes: Mapping[int, int]) -> str:
        """Return why a client did not answer."""
        if reply is not None:
            return " ".join(reply.error.reason.split()) if reply.error.reason else "its node failed"
        if client not in nodes:
            return "no connected node holds its data"
        return f"no reply within {self._timeout:g} s (--client-timeout)"

    def _send(self, content: RecordDict, node: int, kind: str, group: str) -> str:
        """Send a message; return its id, or an empty string if it could not be sent."""
        message = Message(content, node, kind, group_id=group)
        return next((str(number) for number in self._grid.push_messages([message]) if number), "")

    def _replies(self, waiting: set[str], end: float | None) -> Iterator[Message]:
        """Yield replies as they arrive, until all have arrived or the time is over."""
        while waiting:
            found = list(self._grid.pull_messages(list(waiting)))
            waiting -= {message.metadata.reply_to_message_id for message in found}
            yield from found
            if not found:
                if end is not None and time.monotonic() > end:
                    return
                time.sleep(PAUSE)

    def _update_registry(self) -> dict[int, int]:
        """Return the node of every connected client; ask new nodes for their client."""
        connected = set(self._grid.get_node_ids())
        self._known &= connected
        self._nodes = {c: node for c, node in self._nodes.items() if node in connected}
        asked = {
            self._send(pack({}), node, IDENTIFY, "") for node in sorted(connected - self._known)
        } - {""}
        for message in self._replies(asked, time.monotonic() + IDENTIFY_TIMEOUT):
            self._known.add(message.metadata.src_node_id)
            if message.has_error():
                continue
            try:
                client = unpack(message.content)[0].get("client")
            except MalformedError:
                continue
            if client in self._clients:
                self._nodes.setdefault(client, message.metadata.src_node_id)
        return dict(self._nodes)
