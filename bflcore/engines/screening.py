"""The screen: what a client's result must be before it may touch the server.

It refuses results that would break the server or corrupt its posterior. It does not defend
against a client that lies within these bounds; robust aggregators do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.errors import ClientError, RoundError
from bflcore.lazy import lazy
from bflcore.messages import Answer, Evaluation, LocalResult, Personalised
from bflcore.problem.plausibility import impossible
from bflcore.problem.ranking import FINEST
from bflcore.randomness import SERVER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.engines.base import EvaluationReply, FitReply, PersonaliseReply, SurveyReply
    from bflcore.messages import Broadcast
    from bflcore.options import Component
    from bflcore.posteriors import Posterior
else:
    torch = lazy("torch")

__all__ = [
    "LARGEST",
    "screen",
    "screen_answer",
    "screen_evaluations",
    "screen_fused",
    "screen_personalised",
]

# Largest magnitude of a number that a client may send. Sums of a million squares of such numbers
# are finite in float32, and no meaningful parameter, variance or loss comes near it.
LARGEST = 1e15
LONGEST = 2000  # characters of an error that a client may send


def screen(reply: FitReply, broadcast: Broadcast) -> Iterator[FitReply]:
    """Yield each client's result ``[1, ...]`` alone, or the error that keeps it out.

    A reply that names no client is an error of `SERVER`.
    """
    if isinstance(reply, ClientError):
        yield _bounded(reply, "fit")
        return
    if error := _nameless(reply, LocalResult, "fit"):
        yield error
        return
    try:
        malformed = _check_form(reply, broadcast) or _check_counts(reply)
    except Exception as error:  # noqa: BLE001 - a client may send anything
        malformed = _malformed("result", error)
    for row, client in enumerate(reply.clients):
        if malformed:
            yield ClientError(client, "fit", malformed)
            continue
        try:
            result = reply.select([row])
            reason = _check_values(result)
        except Exception as error:  # noqa: BLE001 - types on which arithmetic is not defined
            reason = _malformed("result", error)
        yield ClientError(client, "fit", reason) if reason else result


def screen_answer(
    reply: SurveyReply, form: Mapping[str, Tensor], stage: str = "survey"
) -> SurveyReply:
    """Return a client's sums, or the error that keeps them out of the total.

    `form` has the names, shapes and dtypes that an answer ``[...]`` must have.
    """
    if isinstance(reply, ClientError):
        return _bounded(reply, stage)
    if error := _nameless(reply, Answer, stage):
        return error
    try:
        if reason := _not_plain(reply.sums, "sum"):
            return ClientError(reply.client, stage, reason)
        found = {n: (t.dtype, list(t.shape)) for n, t in sorted(reply.sums.items())}
        due = {n: (t.dtype, list(t.shape)) for n, t in sorted(form.items())}
        if found != due:
            reason = f"its answer has the form {found}, not {due}"
        else:
            wrong = [n for n, t in reply.sums.items() if not bool(t.isfinite().all())]
            wrong += [n for n, t in reply.sums.items() if not _plausible(n, t, stage)]
            reason = f"{wrong[0]} of its answer is not an allowed number" if wrong else ""
    except Exception as error:  # noqa: BLE001 - a client may send anything
        reason = _malformed("answer", error)
    return ClientError(reply.client, stage, reason) if reason else reply


def screen_personalised(
    replies: Iterable[PersonaliseReply], asked: Collection[int]
) -> Iterator[PersonaliseReply]:
    """Yield the replies of clients that were asked; those that cannot be stored become errors."""
    left = set(asked)
    for reply in replies:
        if isinstance(reply, ClientError):
            yield _bounded(reply, "personalise")
        elif error := _nameless(reply, Personalised, "personalise"):
            yield error
        elif reply.client in left:
            left.remove(reply.client)
            try:
                reason = _not_plain(reply.memory or {}, "memory")
                reason = reason or _not_plain(reply.calibration, "sum")
            except Exception as problem:  # noqa: BLE001 - a client may send anything
                reason = _malformed("model", problem)
            yield ClientError(reply.client, "personalise", reason) if reason else reply


def _bounded(error: ClientError, stage: str) -> ClientError:
    """Return a client's own error, with a reason that a line can hold."""
    known = type(error.client) is int and type(error.reason) is str
    if known and len(error.reason) <= LONGEST:
        return error
    client = error.client if type(error.client) is int else SERVER
    return ClientError(client, stage, str(error.reason)[:LONGEST])


def _nameless(reply: Any, due: type[Any], stage: str) -> ClientError | None:
    """Return the error of a reply which is not `due`, or names no client."""
    if type(reply) is not due:
        reason = f"expected {due.__name__} from its engine, got {type(reply).__name__}"
        return ClientError(SERVER, stage, reason)
    named = reply.clients if isinstance(reply, LocalResult) else (reply.client,)
    if type(named) is tuple and named and all(type(client) is int for client in named):
        return None
    return ClientError(SERVER, stage, f"a {due.__name__} from its engine names no client")


def _not_plain(tensors: Mapping[str, Tensor], what: str) -> str | None:
    """Return which of the tensors ``[...]`` a file could not hold; None if it could all."""
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            return f"a {what} is named {name!r}; only text is allowed"
        if reason := _wrong_kind(f"{what} {name}", tensor):
            return reason
    return None


def _wrong_kind(name: str, tensor: Tensor) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"{name}: expected a tensor, got {type(tensor).__name__}"
    if type(tensor) is not torch.Tensor:
        return f"{name} is a {type(tensor).__name__}; only a plain tensor is allowed"
    if tensor.dtype not in _real():
        return f"{name} is {tensor.dtype}; only real numbers are allowed"
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"{name} is {tensor.layout} on {tensor.device}; only plain tensors are allowed"
    if tensor.requires_grad:
        return f"{name} requires grad; detach it"
    return None


def _real() -> tuple[torch.dtype, ...]:
    """Return the kinds of numbers that a reply may hold: those that every file format has."""
    whole = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return (*whole, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _malformed(what: str, error: Exception) -> str:
    try:
        text = " ".join(str(error).split())[:LONGEST]
    except Exception:  # noqa: BLE001 - an exception that cannot even be printed
        text = ""
    return f"malformed {what} ({type(error).__name__}: {text})"


def _plausible(name: str, sums: Tensor, stage: str) -> bool:
    """Return whether no number of samples, and no sum of the calibration, is negative or huge."""
    if name != "examples" and stage != "calibrate":
        return True
    return bool(((sums >= 0) & (sums <= LARGEST)).all())


def screen_evaluations(
    replies: Sequence[EvaluationReply], asked: Collection[int]
) -> list[EvaluationReply]:
    """Return the replies of clients that were asked; those that cannot be used become errors.

    Their sums must have the form of most of the others', and be possible (`impossible`). Metrics
    that are not finite pass: a model that diverged has such metrics.
    """
    clients = frozenset(asked)
    named = [
        _bounded(reply, "evaluate")
        if isinstance(reply, ClientError)
        else _nameless(reply, Evaluation, "evaluate") or reply
        for reply in replies
    ]
    found: list[EvaluationReply] = [reply for reply in named if reply.client == SERVER]
    known = [reply for reply in named if reply.client in clients]
    forms = [_form(reply) for reply in known]
    usual = Counter(form for form in forms if form).most_common(1)
    seen: set[tuple[int, bool]] = set()
    for reply, form in zip(known, forms, strict=True):
        if isinstance(reply, ClientError):
            found.append(reply)
            continue
        if not form or form != usual[0][0]:
            reason = "its sums do not have the form of the others'"
        elif (reply.client, reply.validation) in seen:
            reason = "it was evaluated twice"
        else:
            seen.add((reply.client, reply.validation))
            reason = next(filter(None, map(impossible, _groups(reply))), "")
        found.append(ClientError(reply.client, "evaluate", reason) if reason else reply)
    return found


def _groups(reply: Evaluation) -> list[Mapping[str, Tensor]]:
    """Return every set of sums in an evaluation."""
    found = [reply.personal, *filter(None, (reply.shared, reply.calibrated, reply.ood))]
    return found + [sums for points in reply.curves.values() for sums in points.values()]


def screen_fused(part: Component, found: Posterior, due: Posterior, round: int) -> None:
    """Raise `RoundError` unless what a server's part `found` ``[P]`` may be kept.

    It must have the family, the shapes and the dtypes of `due` ``[P]``, must not require grad, and
    must be valid.
    """
    if reason := _unfit(found, due) or found.invalid():
        raise RoundError(
            f"round {round}: {part.kind} {part.name} gave an invalid posterior: {reason}; nothing "
            "of this round is kept. Mend the part (bfl check-plugin says more)"
        )


def _unfit(found: Posterior, due: Posterior) -> str | None:
    """Return in what a posterior's form is not that of another; None if it is the same."""
    if type(found) is not type(due):
        return f"it is {type(found).__name__}, not {type(due).__name__}"
    for name, tensor in found.pack().items():
        wanted = due.pack()[name]
        if (tensor.dtype, tensor.shape) != (wanted.dtype, wanted.shape):
            form, right = (f"{t.dtype} {list(t.shape)}" for t in (tensor, wanted))
            return f"{name} is {form}, not {right}"
        if tensor.requires_grad:
            return f"{name} requires grad; detach it"
    return None


def _form(reply: EvaluationReply) -> str:
    """Return names, shapes and types of an evaluation's sums as text; "" if it is malformed."""
    if isinstance(reply, ClientError):
        return ""
    try:
        if type(reply.validation) is not bool or any(_not_plain(g, "sum") for g in _groups(reply)):
            return ""
        groups = _groups(attrs.evolve(reply, ood=None))
        if not all(float(group["examples"]) >= 1 for group in groups):
            return ""
        if reply.ood is not None:  # not every evaluation has it: it is no part of the form
            found = {name: list(tensor.shape) for name, tensor in reply.ood.items()}
            if found != {"examples": [], "strangeness": [2, FINEST]}:
                return ""
        axes = [(axis, list(points)) for axis, points in reply.curves.items()]
        sums = [[(n, list(t.shape), t.dtype) for n, t in sorted(group.items())] for group in groups]
    except Exception:  # noqa: BLE001 - a client may send anything
        return ""
    return f"{sums}, {axes}"


def _check_form(reply: LocalResult, broadcast: Broadcast) -> str | None:
    """Return which tensor has the wrong type, family, dtype or shape; None if all fit."""
    start, clients = broadcast.start, len(reply.clients)
    if type(reply.posterior) is not type(start):
        return f"posterior is {type(reply.posterior).__name__}, not {type(start).__name__}"
    unnamed = [name for name in (*reply.statistics, *reply.memory) if not isinstance(name, str)]
    if unnamed:
        return f"a tensor is named {unnamed[0]!r}; only text is allowed"
    for name, tensor in _tensors(reply).items():
        if reason := _wrong_kind(name, tensor):
            return reason
        rows = len(tensor) if tensor.ndim else "no"
        if rows != clients:
            return f"{name} has {rows} rows for {clients} clients"
    wanted = start.pack()
    for name, tensor in reply.posterior.pack().items():
        found, due = (tensor.dtype, list(tensor.shape[1:])), wanted[name]
        if found != (due.dtype, list(due.shape)):
            return f"{name} is {found[0]} {found[1]}, not {due.dtype} {list(due.shape)}"
    return None


def _check_counts(reply: LocalResult) -> str | None:
    """Return why `examples` or `loss` is malformed; None if neither is."""
    for name, tensor in (("examples", reply.examples), ("loss", reply.loss)):
        if tensor.ndim != 1:
            return f"{name} is {list(tensor.shape[1:])} per client, not one number"
    if reply.examples.is_floating_point() or reply.examples.dtype == torch.bool:
        return f"examples is {reply.examples.dtype}, not an integer"
    if not reply.loss.is_floating_point():
        return f"loss is {reply.loss.dtype}, not a real number"
    return None


def _check_values(result: LocalResult) -> str | None:
    """Return which value of one client's well-formed result is not allowed; None if all are."""
    examples, loss = int(result.examples[0]), float(result.loss[0])
    if not 0 < examples <= LARGEST:
        return f"examples is {examples}; a client that trained has at least one"
    if not abs(loss) <= LARGEST:
        return f"loss is {loss:g}"
    for name, tensor in _tensors(result).items():
        # Both ends: the absolute value of the least integer is negative.
        if tensor.dtype != torch.bool and not bool(
            ((tensor <= LARGEST) & (tensor >= -LARGEST)).all()
        ):
            finite = bool(tensor.isfinite().all())
            return f"{name} is " + (f"larger than {LARGEST:g}" if finite else "not finite")
    return result.posterior[0].invalid()


def _tensors(reply: LocalResult) -> dict[str, Tensor]:
    return {
        "examples": reply.examples,
        "loss": reply.loss,
        **reply.posterior.pack(),
        **{f"statistic {name}": tensor for name, tensor in reply.statistics.items()},
        **{f"memory {name}": tensor for name, tensor in reply.memory.items()},
    }
