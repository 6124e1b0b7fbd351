"""Replies as bytes: a JSON text and the bytes of tensors, so that none is ever unpickled.

A message is the length of the text as eight bytes, the text, and the tensors' bytes one after the
other. The text holds the replies as a tree of plain values: a tensor is there as its dtype and its
shape, a class of messages as its name and its fields, and no other class is known. Messages are not
trusted; a malformed one raises `ValueError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np
import torch

from bflcore.errors import ClientError
from bflcore.messages import Answer, Evaluation, LocalResult, Personalised
from bflcore.posteriors import Posterior

__all__ = ["Reply", "pack", "unpack"]

Reply = LocalResult | Evaluation | Answer | Personalised | ClientError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),  # refused later, by name, like any wrong dtype
    )
}
FIELDS: dict[type[Reply], tuple[str, ...]] = {
    cls: tuple(field.name for field in attrs.fields(cls))
    for cls in (LocalResult, Evaluation, Answer, Personalised)
}
FIELDS[ClientError] = ("client", "stage", "reason", "trace")
CLASSES: dict[str, type[Reply]] = {cls.__name__: cls for cls in FIELDS}
LENGTH = 8  # bytes of the text's length


def pack(replies: Sequence[Reply]) -> bytearray:
    """Return replies as bytes. Raises `TypeError` for what cannot be sent."""
    found: list[torch.Tensor] = []
    text = json.dumps([_encode(reply, found) for reply in replies]).encode()
    begin = LENGTH + len(text)
    message = bytearray(begin + sum(tensor.nbytes for tensor in found))
    message[:LENGTH] = len(text).to_bytes(LENGTH, "little")
    message[LENGTH:begin] = text
    whole = np.frombuffer(message, np.uint8)
    for tensor in found:
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        whole[begin : begin + len(flat)] = flat
        begin += len(flat)
    return message


def unpack(
    message: bytes | bytearray,
    family: type[Posterior] | None = None,
    device: torch.device | str = "cpu",
) -> list[Reply]:
    """Return the arguments of `pack`, with tensors on `device` and sequences as tuples.

    A result has posteriors of the `family`; of another one, it becomes its clients' error. Raises
    `ValueError`.
    """
    try:
        length = int.from_bytes(message[:LENGTH], "little")
        text = bytes(message[LENGTH : LENGTH + length])
        tensors = _Tensors(message, LENGTH + length, device)
        trees: list[Any] = [*json.loads(text)]
        return [reply for tree in trees for reply in _replies(tree, tensors, family)]
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}"[:300]) from error


class _Tensors:
    """The tensors of a message, in order."""

    def __init__(self, message: bytes | bytearray, begin: int, device: torch.device | str) -> None:
        self._bytes = np.frombuffer(message, np.uint8)
        self._begin, self._device = begin, device

    def take(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the next tensor ``[*shape]``, in memory of its own."""
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a tensor has the shape {shape}")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        end = self._begin + size
        if end > len(self._bytes):
            raise ValueError("the message ends too soon")
        flat = torch.empty(size, dtype=torch.uint8)  # begins where torch's own tensors do
        flat.numpy()[:] = self._bytes[self._begin : end]
        self._begin = end
        return flat.view(DTYPES[dtype]).reshape(list(shape)).to(self._device)


def _encode(value: object, found: list[torch.Tensor]) -> Any:
    """Return plain values; tensors ``[...]`` are appended to `found`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(f"a {type(value).__name__} of {value.dtype} cannot be sent")
        found.append(value.detach().cpu().contiguous())
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"items": [[_encode(k, found), _encode(v, found)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [_encode(item, found) for item in value]
    if isinstance(value, Posterior):
        return {"family": type(value).__name__, "fields": _encode(value.pack(), found)}
    if type(value) in FIELDS:
        names = FIELDS[cast("type[Reply]", type(value))]
        fields = {name: getattr(value, name) for name in names}
        return {"class": type(value).__name__, "fields": _encode(fields, found)}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode(tree: Any, tensors: _Tensors) -> Any:
    """Return plain values, tensors, tuples and dictionaries; classes are left as they are."""
    if isinstance(tree, list):
        return tuple(_decode(item, tensors) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "items" in tree:
        return {_decode(key, tensors): _decode(value, tensors) for key, value in tree["items"]}
    if "family" in tree:
        return _Sent(str(tree["family"]), _decode(tree["fields"], tensors))
    return tensors.take(tree["dtype"], tree["shape"])


@attrs.frozen
class _Sent:
    """A posterior as it was sent: the name of its family, and its tensors ``[...]``."""

    family: str
    fields: Mapping[str, torch.Tensor]


def _replies(tree: Any, tensors: _Tensors, family: type[Posterior] | None) -> Iterator[Reply]:
    cls, fields = CLASSES[tree["class"]], _decode(tree["fields"], tensors)
    if set(fields) != set(FIELDS[cls]):
        raise ValueError(f"the fields of {cls.__name__} are {sorted(fields)}")
    if cls is LocalResult:
        sent, due = fields["posterior"], family.__name__ if family else "one"
        if family is None or sent.family != due:
            reason = f"posterior is {sent.family}, not {due}"
            yield from (ClientError(client, "fit", reason) for client in fields["clients"])
            return
        fields["posterior"] = family.unpack(sent.fields)
    yield cls(**fields)
