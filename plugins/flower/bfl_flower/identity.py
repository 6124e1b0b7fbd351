"""A node's key, with which it proves under another node id that it is the same.

Flower ties a node id to the node's registered key, where nodes are registered. Elsewhere a node
that is started again gets another id. So each node has an Ed25519 key of its own in its folder of
memories, and signs with it a number that the server draws anew for each question.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from bfl_flower.limits import MalformedError
from bflcore.errors import RunError
from bflcore.files import sync

__all__ = ["proven_key", "read_key", "signed"]

FILE = "identity.key"


def read_key(folder: Path) -> Ed25519PrivateKey:
    """Return the key in a folder, made when it is first asked for; only its owner can read it.

    Raises `RunError` if there is no valid key in the file, or it cannot be written.
    """
    path = folder / FILE
    try:
        if not path.exists():
            _make_key(path)
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text("ascii")))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise RunError(
            f"{path} cannot be used as this node's key ({reason}); restore it, or have the server "
            "delete nodes.json in its run directory"
        ) from None


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(Ed25519PrivateKey.generate().private_bytes_raw().hex())
    sync(aside)
    aside.replace(path)


def signed(key: Ed25519PrivateKey, client: int, number: str) -> dict[str, str]:
    """Return what a node adds to its client's number: its public key and a signature."""
    public = key.public_key().public_bytes_raw().hex()
    return {"key": public, "signature": key.sign(_message(client, number)).hex()}


def proven_key(fields: Mapping[str, Any], number: str) -> str:
    """Return the public key that a node has proved to hold; "" if it did not give one.

    Raises `MalformedError` if the signature is not that of the key, the client and the `number`.
    """
    public = fields.get("key", "")
    if public == "":
        return ""
    try:
        holder = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        holder.verify(bytes.fromhex(fields["signature"]), _message(fields["client"], number))
    except (InvalidSignature, KeyError, TypeError, ValueError):
        raise MalformedError("its signature is not that of the key it gives") from None
    return holder.public_bytes_raw().hex()


def _message(client: object, number: str) -> bytes:
    return f"bfl-flower: client {client!r}, {number}".encode()
