"""The wire format: tensors as Flower's arrays, everything else as one JSON text.

Nothing is ever unpickled: arrays are in numpy's format without objects. Messages are not trusted;
a malformed one raises `MalformedError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from bfl_flower.limits import NAME, MalformedError, check_size, room_for, shown
from bflcore.errors import ClientError
from bflcore.messages import (
    CALIBRATION,
    Answer,
    Broadcast,
    Evaluation,
    LocalResult,
    Personalised,
    within,
)
from bflcore.posteriors import Posterior

__all__ = [
    "ACTIONS",
    "CALIBRATE",
    "EVALUATE",
    "FIT",
    "IDENTIFY",
    "PERSONALISE",
    "STAGES",
    "SURVEY",
    "MalformedError",
    "Question",
    "Reply",
    "Task",
    "TaskReply",
    "pack",
    "unpack",
]

# Message types: Flower's own categories, the last two with an action of ours.
FIT, EVALUATE, IDENTIFY = "train", "evaluate", "query"
SURVEY, CALIBRATE, PERSONALISE = "query.survey", "query.calibrate", "query.personalise"
ACTIONS = ("default", "survey", "calibrate", "personalise")  # of queries
STAGES = {
    FIT: "fit",
    EVALUATE: "evaluate",
    CALIBRATE: "calibrate",
    PERSONALISE: "personalise",
}

Tensors = Mapping[str, Tensor]
TaskReply = LocalResult | Evaluation | Answer | Personalised | ClientError
Reply = TaskReply


def pack(fields: Mapping[str, Any], tensors: Tensors | None = None) -> RecordDict:
    """Return the content of a message."""
    arrays = {
        name: Array(tensor.detach().cpu().numpy()) for name, tensor in (tensors or {}).items()
    }
    text = ConfigRecord({"json": json.dumps(fields).encode()})
    return RecordDict({"tensors": ArrayRecord(arrays), "fields": text})


def unpack(
    content: RecordDict, device: torch.device | str = "cpu", room: float = math.inf
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the arguments of `pack`, with tensors on `device`.

    `room` is how many bytes the tensors may have. Raises `MalformedError`.
    """
    try:
        text, arrays = content.config_records["fields"]["json"], content.array_records["tensors"]
        check_size(text, arrays, room)
        fields = json.loads(text)  # type: ignore[arg-type]
        tensors = {n: torch.from_numpy(array.numpy()).to(device) for n, array in arrays.items()}
    except MalformedError:
        raise
    except Exception as error:  # numpy, json and Flower raise many errors on a malformed message
        raise MalformedError(f"{type(error).__name__}: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedError(f"expected a JSON object, got {type(fields).__name__}")
    return fields, tensors


class Question:
    """The survey's request to one client, and the format of its answer.

    `known` ``[...]`` are the sums of the answers so far.
    """

    stage_name = "survey"

    def __init__(self, client: int, known: Tensors) -> None:
        self.client, self.known = client, known

    def pack(self) -> RecordDict:
        """Return the content of the request."""
        return pack({"client": self.client}, self.known)

    @classmethod
    def unpack(cls, content: RecordDict, device: torch.device) -> Question:
        """Return the request. Raises `MalformedError`."""
        fields, tensors = unpack(content, device)
        return cls(int(fields["client"]), tensors)

    def answer(self, reply: Answer | ClientError) -> RecordDict:
        """Return the content of the answer, or of an error."""
        if isinstance(reply, ClientError):
            return pack({"error": reply.reason})
        return pack({}, reply.sums)

    def read(self, content: RecordDict) -> list[Reply]:
        """Read the content written by `answer`; if malformed, return a `ClientError`."""
        try:
            fields, tensors = unpack(content, room=room_for(_nbytes(self.known)))
        except MalformedError as error:
            return [_refused(self.client, "survey", error)]
        if "error" in fields:
            return [ClientError(self.client, "survey", shown(str(fields["error"])))]
        return [Answer(self.client, tensors)]


class Task:
    """A request to one client, and the format of its answer.

    `due` says on which samples a client must be evaluated, because it was before: False its test
    samples, True its validation samples.
    """

    def __init__(
        self,
        stage: str,
        client: int,
        broadcast: Broadcast,
        memory: Tensors,
        due: frozenset[bool] = frozenset(),
    ) -> None:
        self.stage, self.client, self.broadcast, self.memory = stage, client, broadcast, memory
        self.due = due

    def pack(self) -> RecordDict:
        """Return the content of the request."""
        memory = {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        fields = {"client": self.client, "round": self.broadcast.round}
        return pack(fields, self.broadcast.sent() | memory)

    @classmethod
    def unpack(
        cls,
        stage: str,
        content: RecordDict,
        family: type[Posterior],
        device: torch.device,
        first_prior: Callable[[dict[str, Tensor]], Posterior] | None = None,
    ) -> Task:
        """Return the request; see `Broadcast.unpack`. Raises `MalformedError`."""
        fields, tensors = unpack(content, device)
        try:
            broadcast = Broadcast.unpack(int(fields["round"]), tensors, family, first_prior)
            return cls(stage, int(fields["client"]), broadcast, within(tensors, "memory."))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise MalformedError(f"{type(error).__name__}: {error}") from error

    def answer(self, replies: Sequence[TaskReply]) -> RecordDict:
        """Return the content of the answer: a result, sums, an error, or a few evaluations.

        After the last round, it is the memory with which the client predicts; no memory, if that
        is unchanged, and no answer (`stored`) if the node keeps its model to itself.
        """
        for reply in replies:
            if isinstance(reply, ClientError):
                return pack({"error": reply.reason})
            if isinstance(reply, LocalResult):
                return pack({"examples": int(reply.examples[0])}, _of_result(reply))
            if isinstance(reply, Answer):
                return pack({}, reply.sums)
            if isinstance(reply, Personalised):
                memory = {f"memory.{name}": t for name, t in (reply.memory or {}).items()}
                sums = {f"{CALIBRATION}{name}": t for name, t in reply.calibration.items()}
                return pack({"own": reply.memory is not None}, memory | sums)
        if self.stage == PERSONALISE:
            return pack({"stored": True})
        found = [reply for reply in replies if isinstance(reply, Evaluation)]
        each = [_of_sums(f"{i}.", evaluation) for i, evaluation in enumerate(found)]
        untested = {} if found else {"untested": True}
        return pack(
            {"evaluations": [*map(_form, found)], **untested},
            {n: t for of in each for n, t in of.items()},
        )

    def read(self, content: RecordDict) -> list[Reply]:
        """Read the content written by `answer`; if malformed, return a `ClientError`."""
        try:
            sent = _nbytes(self.broadcast.start.pack()) + _nbytes(self.memory)
            fields, tensors = unpack(content, self.broadcast.start.mean.device, room_for(sent))
            if "error" in fields:
                return [ClientError(self.client, self.stage_name, shown(str(fields["error"])))]
            return self._replies(fields, tensors)
        except Exception as error:  # noqa: BLE001 - a client may send anything
            return [_refused(self.client, self.stage_name, error)]

    def _replies(self, fields: Mapping[str, Any], tensors: Tensors) -> list[Reply]:
        if self.stage == FIT:
            return [self._result(fields, tensors)]
        if self.stage == CALIBRATE:
            return [Answer(self.client, tensors)]
        if self.stage == PERSONALISE:
            if fields.get("stored"):
                return []
            own = within(tensors, "memory.") if fields["own"] else None
            return [Personalised(self.client, own, within(tensors, CALIBRATION))]
        return self._evaluations(fields, tensors)

    @property
    def stage_name(self) -> str:
        """Name of the stage in errors."""
        return STAGES[self.stage]

    def _result(self, fields: Mapping[str, Any], tensors: Tensors) -> LocalResult:
        family, examples = type(self.broadcast.start), fields["examples"]
        if type(examples) is not int:
            raise MalformedError(f"examples is {examples!r:.50}, not an integer")
        known = self.broadcast.start.pack()
        structure = {f"posterior.{name}": known[name][None] for name in family.structure}
        return LocalResult(
            (self.client,),
            family.unpack({**tensors, **structure}, "posterior."),
            torch.tensor([examples]),
            tensors["loss"],
            within(tensors, "statistics."),
            within(tensors, "memory."),
        )

    def _evaluations(self, fields: Mapping[str, Any], tensors: Tensors) -> list[Reply]:
        """Return a client's evaluations; none only if it says that it has nothing to evaluate."""
        forms = fields["evaluations"]
        if not isinstance(forms, list) or len(forms) > len((False, True)):
            raise MalformedError("expected a list of at most 2 evaluations")
        found = [self._evaluation(form, within(tensors, f"{i}.")) for i, form in enumerate(forms)]
        kinds = {evaluation.validation for evaluation in found}
        if missing := sorted(self.due - kinds):
            samples = "validation" if missing[0] else "test"
            raise MalformedError(f"no evaluation on {samples} samples, though there was one before")
        if not found and fields.get("untested") is not True:
            raise MalformedError("neither an evaluation nor word that there are no samples for one")
        return [*found]

    def _evaluation(self, fields: Mapping[str, Any], tensors: Tensors) -> Evaluation:
        curves: dict[str, dict[float, Tensors]] = {}
        for i, (axis, value) in enumerate(fields["curves"]):
            if not (isinstance(axis, str) and len(axis) <= NAME):
                raise MalformedError(f"a curve's axis is not a text of at most {NAME} characters")
            curves.setdefault(axis, {})[float(value)] = within(tensors, f"curve.{i}.")
        shared = within(tensors, "shared.") if fields["shared"] else None
        personal, validation = within(tensors, "personal."), bool(fields["validation"])
        calibrated = within(tensors, "calibrated.")
        ood = within(tensors, "ood.") or None
        return Evaluation(self.client, personal, shared, curves, validation, calibrated, ood)


def _refused(client: int, stage: str, error: Exception) -> ClientError:
    """Return the client's error for a reply that cannot be read."""
    said = str(error) if isinstance(error, MalformedError) else f"{type(error).__name__}: {error}"
    return ClientError(client, stage, shown(f"malformed reply ({said})"))


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _of_result(result: LocalResult) -> dict[str, Tensor]:
    return {
        **result.posterior.without_structure("posterior."),
        "loss": result.loss,
        **{f"statistics.{name}": tensor for name, tensor in result.statistics.items()},
        **{f"memory.{name}": tensor for name, tensor in result.memory.items()},
    }


def _form(found: Evaluation) -> dict[str, Any]:
    curves = [(axis, value) for axis, points in found.curves.items() for value in points]
    shared = found.shared is not None
    return {"shared": shared, "curves": curves, "validation": found.validation}


def _of_sums(prefix: str, found: Evaluation) -> dict[str, Tensor]:
    points = [sums for points in found.curves.values() for sums in points.values()]
    groups = {"personal": found.personal, "shared": found.shared or {}, "ood": found.ood or {}}
    groups["calibrated"] = found.calibrated
    groups |= {f"curve.{i}": sums for i, sums in enumerate(points)}
    return {
        f"{prefix}{group}.{name}": tensor
        for group, sums in groups.items()
        for name, tensor in sums.items()
    }
