"""A grid of nodes in this process."""

from __future__ import annotations

from uuid import uuid4

from flwr.app import Error, Message
from flwr.serverapp import Grid


class Loopback(Grid):
    """Nodes in this process: a message is answered when its reply is asked for."""

    def __init__(self, nodes):
        self.nodes = dict(nodes)  # node id -> Node
        self.mute, self.broken = set(), set()
        self._sent = {}

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
            self._sent[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        """Return replies in the opposite order of the questions."""
        found = []
        for number in sorted(message_ids, key=list(self._sent).index, reverse=True):
            message = self._sent[number]
            node = message.metadata.dst_node_id
            if node not in self.mute:
                found.append(self._reply(node, message))
        return found

    def _reply(self, node, message):
        if node in self.broken or node not in self.nodes:
            return Message(Error(3, "node is\nunavailable"), reply_to=message)
        return self.nodes[node].answer(message)
