"""Which node holds which client: decided once, and kept for the whole run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.integrity import read_json, write_json

__all__ = ["ClientRegistry"]

AGAIN = "restore it; or delete it, and the first node that claims a client holds it again"


@attrs.frozen
class Holder:
    """The node that holds a client, and the public key that it proved; "" if it has none."""

    node: int
    key: str = ""


class ClientRegistry:
    """The nodes that hold the clients of a run, and who else claimed a client.

    The first node that claims a client holds it until the end of the run. Another node takes its
    place only if it proves the same key; then it is the same node, started again. A node that
    holds a client cannot claim a second one. With a `file`, a run that continues keeps its holders.

    Raises `RunError` if the file is damaged.
    """

    def __init__(self, clients: Iterable[int], file: Path | None = None) -> None:
        self.connected: Collection[int] = frozenset()  # nodes, as Flower counts them
        self._clients = frozenset(clients)
        self._file = file
        self._holders: dict[int, Holder] = {}
        self._refused: dict[int, int] = {}  # client -> the last node that was refused
        if file is not None and file.exists():
            self._holders = _read(file)

    @property
    def nodes(self) -> dict[int, int]:
        """The connected node of each client, by client."""
        found = sorted(self._holders.items())
        return {client: one.node for client, one in found if one.node in self.connected}

    @property
    def holders(self) -> set[int]:
        """The nodes that hold a client, connected or not."""
        return {holder.node for holder in self._holders.values()}

    def claim(self, node: int, client: object, key: str) -> str:
        """Let a node that proved this key hold a client; return why it may not, or ""."""
        if type(client) is not int or client not in self._clients:
            return f"it claims client {client!r:.50}, which is not one of this run's"
        if node in self.holders and self._node_of(client) != node:
            return f"it claims client {client}, but holds another one"
        held = self._holders.get(client)
        if held is not None and held.node != node and not (key and key == held.key):
            self._refused[client] = node
            return (
                f"it claims client {client}, which node {held.node} holds, and cannot prove that "
                "it is the same node"
            )
        self._holders[client] = Holder(node, key or (held.key if held else ""))
        self._refused.pop(client, None)
        self._write()
        return ""

    def absence(self, client: int) -> str:
        """Say why no node can be asked for a client."""
        if client not in self._refused:
            return "no connected node holds its data"
        return (
            f"the node that holds its data is not connected; node {self._refused[client]}, which "
            "claims to be it, is refused"
        )

    def _node_of(self, client: int) -> int | None:
        held = self._holders.get(client)
        return held.node if held else None

    def _write(self) -> None:
        if self._file is not None:
            found = {str(c): attrs.asdict(one) for c, one in sorted(self._holders.items())}
            write_json(self._file, {"nodes": found})


def _read(file: Path) -> dict[int, Holder]:
    try:
        stored: dict[str, Any] = read_json(file, AGAIN)["nodes"]
        return {
            int(client): Holder(int(one["node"]), str(one["key"])) for client, one in stored.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{file} cannot be read ({type(error).__name__}: {error}); {AGAIN}"
        ) from None
