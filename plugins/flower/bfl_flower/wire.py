"""What travels: tensors as Flower's arrays, everything else as one JSON text.

Nothing is ever unpickled: an array is numpy's own format without objects. What arrives may have
been written by anybody; whatever does not have the right form raises `MalformedError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from bflcore.errors import BflError, ClientError
from bflcore.messages import Broadcast, Evaluation, LocalResult, within
from bflcore.posteriors import Posterior

__all__ = ["EVALUATE", "FIT", "HOLDS", "MalformedError", "Reply", "Task", "packed", "unpacked"]

# Message types: Flower's own category, then ours.
FIT, EVALUATE, HOLDS = "train", "evaluate", "query"

Tensors = Mapping[str, Tensor]
Reply = LocalResult | Evaluation | ClientError


class MalformedError(BflError):
    """A message does not have the form that it should have."""


def packed(said: Mapping[str, Any], tensors: Tensors | None = None) -> RecordDict:
    """Return a message's content."""
    arrays = {
        name: Array(tensor.detach().cpu().numpy()) for name, tensor in (tensors or {}).items()
    }
    text = ConfigRecord({"json": json.dumps(said).encode()})
    return RecordDict({"tensors": ArrayRecord(arrays), "said": text})


def unpacked(
    content: RecordDict, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what `packed` was given, the tensors on `device`. Raises `MalformedError`."""
    try:
        said = json.loads(content.config_records["said"]["json"])  # type: ignore[arg-type]
        arrays = content.array_records["tensors"]
        tensors = {n: torch.from_numpy(array.numpy()).to(device) for n, array in arrays.items()}
    except Exception as error:  # numpy, json and Flower raise much on what is none of theirs
        raise MalformedError(f"{type(error).__name__}: {error}") from error
    if not isinstance(said, dict):
        raise MalformedError(f"JSON object expected, not {type(said).__name__}")
    return said, tensors


class Task:
    """What a client is asked, and what it answers: one client a message."""

    def __init__(self, stage: str, client: int, broadcast: Broadcast, memory: Tensors) -> None:
        self.stage, self.client, self.broadcast, self.memory = stage, client, broadcast, memory

    def packed(self) -> RecordDict:
        """Return the question's content."""
        memory = {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        said = {"client": self.client, "round": self.broadcast.round}
        return packed(said, self.broadcast.pack() | memory)

    @classmethod
    def unpacked(
        cls, stage: str, content: RecordDict, family: type[Posterior], device: torch.device
    ) -> Task:
        """Return the question. Raises `MalformedError`."""
        said, tensors = unpacked(content, device)
        try:
            broadcast = Broadcast.unpack(int(said["round"]), tensors, family)
            return cls(stage, int(said["client"]), broadcast, within(tensors, "memory."))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MalformedError(f"{type(error).__name__}: {error}") from error

    def answer(self, replies: Sequence[Reply]) -> RecordDict:
        """Return the content of the answer: one result, an error, or nothing to tell."""
        if not replies:
            return packed({})
        (reply,) = replies
        if isinstance(reply, ClientError):
            return packed({"error": reply.reason})
        if isinstance(reply, LocalResult):
            return packed({"examples": int(reply.examples[0])}, _of_result(reply))
        curves = [(axis, value) for axis, points in reply.curves.items() for value in points]
        return packed({"shared": reply.shared is not None, "curves": curves}, _of_sums(reply))

    def read(self, content: RecordDict) -> list[Reply]:
        """Return the answer that `answer` packed; a malformed one is the client's error."""
        try:
            said, tensors = unpacked(content, self.broadcast.start.mean.device)
            if "error" in said:
                return [ClientError(self.client, self.stage_name, str(said["error"]))]
            if not said and self.stage == EVALUATE:
                return []
            read = self._result if self.stage == FIT else self._evaluation
            return [read(said, tensors)]
        except MalformedError as error:
            reason = f"malformed reply ({error})"
        except Exception as error:  # noqa: BLE001 - a client may send anything
            reason = f"malformed reply ({type(error).__name__}: {error})"
        return [ClientError(self.client, self.stage_name, reason)]

    @property
    def stage_name(self) -> str:
        """The stage as errors call it."""
        return "fit" if self.stage == FIT else "evaluate"

    def _result(self, said: Mapping[str, Any], tensors: Tensors) -> LocalResult:
        family = type(self.broadcast.start)
        return LocalResult(
            (self.client,),
            family.unpack(tensors, "posterior."),
            torch.tensor([int(said["examples"])]),
            tensors["loss"],
            within(tensors, "statistics."),
            within(tensors, "memory."),
        )

    def _evaluation(self, said: Mapping[str, Any], tensors: Tensors) -> Evaluation:
        curves: dict[str, dict[float, Tensors]] = {}
        for i, (axis, value) in enumerate(said["curves"]):
            curves.setdefault(str(axis), {})[float(value)] = within(tensors, f"curve.{i}.")
        shared = within(tensors, "shared.") if said["shared"] else None
        return Evaluation(self.client, within(tensors, "personal."), shared, curves)


def _of_result(result: LocalResult) -> dict[str, Tensor]:
    return {
        **result.posterior.pack("posterior."),
        "loss": result.loss,
        **{f"statistics.{name}": tensor for name, tensor in result.statistics.items()},
        **{f"memory.{name}": tensor for name, tensor in result.memory.items()},
    }


def _of_sums(found: Evaluation) -> dict[str, Tensor]:
    points = [sums for points in found.curves.values() for sums in points.values()]
    return {
        **{f"personal.{name}": tensor for name, tensor in found.personal.items()},
        **{f"shared.{name}": tensor for name, tensor in (found.shared or {}).items()},
        **{f"curve.{i}.{name}": t for i, sums in enumerate(points) for name, t in sums.items()},
    }
