"""A grid of nodes in this process."""

from __future__ import annotations

from uuid import uuid4

from flwr.app import Error, Message
from flwr.serverapp import Grid

from bfl_flower.node import Node
from bfl_flower.session import GridSession
from bflcore.engines.client import ClientWorker


class Loopback(Grid):
    """Nodes in this process: a message is answered when its reply is asked for."""

    def __init__(self, nodes):
        self.nodes = dict(nodes)  # node id -> Node
        self.mute, self.broken = set(), set()
        self.asked = []  # (node, type of message), in order
        self.sent = {}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = str(uuid4())
            message.metadata.__dict__["_message_id"] = number
            self.sent[number] = message
            self.asked.append((message.metadata.dst_node_id, message.metadata.message_type))
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        """Return replies in the opposite order of the questions."""
        found = []
        for number in sorted(message_ids, key=list(self.sent).index, reverse=True):
            message = self.sent[number]
            node = message.metadata.dst_node_id
            if node not in self.mute:
                found.append(self.reply(node, message))
        return found

    def reply(self, node, message):
        if node in self.broken or node not in self.nodes:
            return Message(Error(3, "node is\nunavailable"), reply_to=message)
        return self.nodes[node].answer(message)


def grid_of(problem, inference, stores=None):
    """Return a grid on which node 100 - c holds client c, for three clients."""
    worker = ClientWorker(problem, inference, 10)
    return Loopback(
        {100 - client: Node(client, worker, stores and stores(client)) for client in range(3)}
    )


def session_of(grid, inference, problem, **options):
    """Return the server's session over a grid."""
    return GridSession(grid, type(inference.initial(problem)), problem.clients, **options)
