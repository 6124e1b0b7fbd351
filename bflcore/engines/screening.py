"""The screen: what a client's result must be before it may touch the server.

It refuses results that would break the server or corrupt its posterior. It does not defend
against a client that lies within these bounds; robust aggregators do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import ClientError, RoundError
from bflcore.lazy import lazy
from bflcore.problem.plausibility import impossible
from bflcore.problem.ranking import FINEST

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.engines.base import EvaluationReply, FitReply, SurveyReply
    from bflcore.messages import Broadcast, Evaluation, LocalResult
    from bflcore.options import Component
    from bflcore.posteriors import Posterior
else:
    torch = lazy("torch")

__all__ = ["LARGEST", "screen", "screen_answer", "screen_evaluations", "screen_fused"]

# Largest magnitude of a number that a client may send. Sums of a million squares of such numbers
# are finite in float32, and no meaningful parameter, variance or loss comes near it.
LARGEST = 1e15


def screen(reply: FitReply, broadcast: Broadcast) -> Iterator[FitReply]:
    """Yield each client's result ``[1, ...]`` alone, or the error that keeps it out."""
    if isinstance(reply, ClientError):
        yield reply
        return
    try:
        malformed = _check_form(reply, broadcast) or _check_counts(reply)
    except Exception as error:  # noqa: BLE001 - a client may send anything
        malformed = f"malformed result ({type(error).__name__}: {error})"
    for row, client in enumerate(reply.clients):
        if malformed:
            yield ClientError(client, "fit", malformed)
            continue
        try:
            result = reply.select([row])
            reason = _check_values(result)
        except Exception as error:  # noqa: BLE001 - types on which arithmetic is not defined
            reason = f"malformed result ({type(error).__name__}: {error})"
        yield ClientError(client, "fit", reason) if reason else result


def screen_answer(
    reply: SurveyReply, form: Mapping[str, Tensor], stage: str = "survey"
) -> SurveyReply:
    """Return a client's sums, or the error that keeps them out of the total.

    `form` has the names, shapes and dtypes that an answer ``[...]`` must have.
    """
    if isinstance(reply, ClientError):
        return reply
    try:
        found = {n: (t.dtype, list(t.shape)) for n, t in sorted(reply.sums.items())}
        due = {n: (t.dtype, list(t.shape)) for n, t in sorted(form.items())}
        if found != due:
            reason = f"its answer has the form {found}, not {due}"
        else:
            wrong = [n for n, t in reply.sums.items() if not bool(t.isfinite().all())]
            wrong += [n for n, t in reply.sums.items() if not _plausible(n, t, stage)]
            reason = f"{wrong[0]} of its answer is not an allowed number" if wrong else ""
    except Exception as error:  # noqa: BLE001 - a client may send anything
        reason = f"malformed answer ({type(error).__name__}: {error})"
    return ClientError(reply.client, stage, reason) if reason else reply


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
    known = [reply for reply in replies if reply.client in clients]
    forms = [_form(reply) for reply in known]
    usual = Counter(form for form in forms if form).most_common(1)
    found: list[EvaluationReply] = []
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
    for name, tensor in _tensors(reply).items():
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: expected a tensor, got {type(tensor).__name__}"
        if tensor.is_complex():
            return f"{name} is {tensor.dtype}; only real numbers are allowed"
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
