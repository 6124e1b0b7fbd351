"""The server side: clients as nodes of a Flower grid."""

from __future__ import annotations

import math
import secrets
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import attrs
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from bfl_flower.clients import ClientRegistry
from bfl_flower.identity import proven_key
from bfl_flower.limits import MalformedError, room_for, shown
from bfl_flower.wire import (
    CALIBRATE,
    EVALUATE,
    FIT,
    IDENTIFY,
    PERSONALISE,
    SURVEY,
    Question,
    Reply,
    Task,
    pack,
    unpack,
)
from bflcore.engines.base import Session
from bflcore.errors import ClientError, RoundError, RunWarning
from bflcore.messages import Answer, Evaluation, Personalised

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bflcore.messages import Broadcast, LocalResult
    from bflcore.posteriors import Posterior

__all__ = ["GridSession"]

PAUSE = 0.02  # seconds between two polls for replies
IDENTIFY_TIMEOUT = 60.0  # seconds that a client is waited for whose node has yet to report it


@attrs.frozen
class Greeting:
    """A question to a new node: the number that it must sign, and until when it is waited for."""

    node: int
    number: str
    deadline: float


@attrs.frozen(eq=False)
class Call:
    """One request to many clients: what is still to be sent, waited for, and handed on."""

    kind: str
    group: str
    tasks: Mapping[int, Task | Question]
    unsent: dict[int, None]  # clients, in order
    waiting: dict[str, tuple[int, int]] = attrs.field(factory=dict)  # message -> client, node
    settled: dict[int, list[Reply]] = attrs.field(factory=dict)

    def fail(self, client: int, reason: str) -> None:
        """Settle a client that gave no reply."""
        stage = self.tasks[client].stage_name
        self.settled[client] = [ClientError(client, stage, reason)]


class GridSession(Session):
    """Clients on a grid whose nodes each hold the data of one client and report its number.

    The server stores what nodes send as memories: the memories themselves in a simulation, round
    tokens if the memories stay on the nodes. Which node holds which client is in `registry`, whose
    `file` outlives the session.
    """

    def __init__(
        self,
        grid: Grid,
        family: type[Posterior],
        clients: Sequence[int],
        timeout: float = 0,
        file: Path | None = None,
    ) -> None:
        self._grid = grid
        self._family = family
        self._timeout = timeout
        self.registry = ClientRegistry(clients, file)
        self._asked: set[int] = set()  # connected nodes that were asked for their client
        self._greeted: dict[str, Greeting] = {}  # those that have not answered yet, by message
        self._due: dict[int, frozenset[bool]] = {}  # what each client was evaluated on
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
        while True:
            self._greet()
            self._pull()
            if len(self.registry.nodes) >= count:
                return sorted(self.registry.nodes)
            if time.monotonic() > end:
                raise RoundError(
                    f"{len(self.registry.nodes)} of {count} clients' nodes connected within "
                    f"{seconds:g} s; start the others, or wait longer"
                )
            time.sleep(10 * PAUSE)

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
        for reply in self._ask(EVALUATE, *self._tasks(EVALUATE, broadcast, clients)):
            if isinstance(reply, Evaluation):
                before = self._due.get(reply.client, frozenset())
                self._due[reply.client] = before | {reply.validation}
            yield cast("Evaluation | ClientError", reply)

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
        tasks = {
            c: Task(stage, c, broadcast, self._memories.get(c, {}), self._due.get(c, frozenset()))
            for c in clients
        }
        return tasks, str(broadcast.round)

    def _ask(self, kind: str, tasks: Mapping[int, Task | Question], group: str) -> Iterator[Reply]:
        """Send every client its task; yield the answers in the order of the tasks.

        A client whose node is still to say that it holds it gets its task as soon as that is known;
        meanwhile the others work.
        """
        self._greet()
        call = Call(kind, group, tasks, dict.fromkeys(tasks))
        end = time.monotonic() + self._timeout if self._timeout else math.inf
        for client in tasks:
            while client not in call.settled:
                self._send_tasks(call)
                if client in call.unsent and not self._may_be_found():
                    call.fail(client, self.registry.absence(client))
                elif client not in call.settled and not self._collect(call):
                    if time.monotonic() > end:
                        call.fail(client, f"no reply within {self._timeout:g} s (--client-timeout)")
                    else:
                        time.sleep(PAUSE)
            yield from call.settled.pop(client)

    def _send_tasks(self, call: Call) -> None:
        """Send the tasks that were not sent yet and whose clients' nodes are known."""
        nodes = self.registry.nodes if call.unsent else {}
        for client in [client for client in call.unsent if client in nodes]:
            del call.unsent[client]
            content = call.tasks[client].pack()
            if number := self._send(content, nodes[client], call.kind, call.group):
                call.waiting[number] = client, nodes[client]
            else:
                call.fail(client, "its node cannot be reached")

    def _collect(self, call: Call) -> bool:
        """Settle the clients whose replies have come; return whether there were any."""
        found = self._pull(call.waiting)
        for message in found:
            client, node = call.waiting.pop(message.metadata.reply_to_message_id)
            if message.metadata.src_node_id != node:
                other = message.metadata.src_node_id
                call.fail(client, f"node {other} answered in its name, and is refused")
            elif message.has_error():
                call.fail(client, shown(str(message.error.reason or "")) or "its node failed")
            else:
                call.settled[client] = call.tasks[client].read(message.content)
        return bool(found)

    def _send(self, content: RecordDict, node: int, kind: str, group: str) -> str:
        """Send a message; return its id, or an empty string if it could not be sent."""
        message = Message(content, node, kind, group_id=group)
        return next((str(number) for number in self._grid.push_messages([message]) if number), "")

    def _pull(self, waiting: Collection[str] = ()) -> list[Message]:
        """Return the replies that have come; what nodes say of themselves is settled here."""
        numbers = [*waiting, *self._greeted]
        found = []
        for message in self._grid.pull_messages(numbers) if numbers else ():
            number = message.metadata.reply_to_message_id
            if number in self._greeted:
                self._meet(self._greeted.pop(number), message)
            elif number in waiting:
                found.append(message)
        return found

    def _greet(self) -> None:
        """Ask new nodes for their client, and do not wait: each is asked once while connected."""
        connected = set(self._grid.get_node_ids())
        self.registry.connected = connected
        self._asked &= connected
        self._greeted = {n: one for n, one in self._greeted.items() if one.node in connected}
        patience = min(self._timeout or IDENTIFY_TIMEOUT, IDENTIFY_TIMEOUT)
        for node in sorted(connected - self._asked - self.registry.holders):
            drawn = secrets.token_hex(16)
            if number := self._send(pack({"number": drawn}), node, IDENTIFY, ""):
                self._greeted[number] = Greeting(node, drawn, time.monotonic() + patience)
                self._asked.add(node)

    def _may_be_found(self) -> bool:
        """Return whether a node may still say in time which client it holds."""
        return any(one.deadline > time.monotonic() for one in self._greeted.values())

    def _meet(self, greeting: Greeting, message: Message) -> None:
        """Let a node hold the client that it claims, or say why it may not."""
        if message.has_error():
            reason = str(message.error.reason or "it failed")
        else:
            reason = self._claim(greeting, message.content)
        if reason:
            warnings.warn(
                f"node {greeting.node} is refused: {shown(reason)}", RunWarning, stacklevel=2
            )

    def _claim(self, greeting: Greeting, content: RecordDict) -> str:
        """Return why a node may not hold the client that it claims, or ""."""
        try:
            fields, _ = unpack(content, room=room_for(0))
            if "error" in fields:
                return str(fields["error"])
            key = proven_key(fields, greeting.number)
            return self.registry.claim(greeting.node, fields.get("client"), key)
        except MalformedError as error:
            return str(error)
