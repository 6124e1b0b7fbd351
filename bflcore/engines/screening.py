"""The screen: what a client's result must be before it may touch the server.

It keeps out what would break the server or turn its posterior into garbage. It is no defence
against a client that lies within these bounds: for that there are robust aggregators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from bflcore.errors import ClientError

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import Broadcast, Evaluation, LocalResult

__all__ = ["LARGEST", "screen", "screen_evaluations"]

# Largest magnitude of a number that a client may send. Sums of a million squares of such numbers
# are finite in float32, and no parameter, variance or loss that means anything comes near.
LARGEST = 1e15


def screen(
    reply: LocalResult | ClientError, broadcast: Broadcast
) -> Iterator[LocalResult | ClientError]:
    """Yield each client's result alone, or the error that keeps it out of the round."""
    if isinstance(reply, ClientError):
        yield reply
        return
    try:
        spoilt = _misshapen(reply, broadcast)
    except Exception as error:  # noqa: BLE001 - a client may send anything
        spoilt = f"malformed result ({type(error).__name__}: {error})"
    for row, client in enumerate(reply.clients):
        if spoilt:
            yield ClientError(client, "fit", spoilt)
            continue
        try:
            result = reply.select([row])
            reason = _fault(result)
        except Exception as error:  # noqa: BLE001 - types on which arithmetic is not defined
            reason = f"malformed result ({type(error).__name__}: {error})"
        yield ClientError(client, "fit", reason) if reason else result


def screen_evaluations(
    replies: Sequence[Evaluation | ClientError],
) -> list[Evaluation | ClientError]:
    """Return the replies, those that cannot be added up with most of the others as errors.

    Figures that are not finite are let through: a model that diverged has such.
    """
    forms = [None if isinstance(reply, ClientError) else _form(reply) for reply in replies]
    counted = Counter(form for form in forms if form)
    usual = counted.most_common(1)[0][0] if counted else ""
    return [
        ClientError(reply.client, "evaluate", "its sums do not have the form of the others'")
        if form is not None and (not form or form != usual)
        else reply
        for reply, form in zip(replies, forms, strict=True)
    ]


def _form(reply: Evaluation) -> str:
    """Return names, shapes and types of an evaluation's sums as text; empty where it has none."""
    try:
        groups = [reply.personal, *([reply.shared] if reply.shared is not None else [])]
        groups += [sums for points in reply.curves.values() for sums in points.values()]
        if not all(float(group["examples"]) >= 1 for group in groups):
            return ""
        axes = [(axis, list(points)) for axis, points in reply.curves.items()]
        sums = [[(n, list(t.shape), t.dtype) for n, t in sorted(group.items())] for group in groups]
    except Exception:  # noqa: BLE001 - a client may send anything
        return ""
    return f"{sums}, {axes}"


def _misshapen(reply: LocalResult, broadcast: Broadcast) -> str:
    """Say which tensor is none, or has the wrong family, dtype or shape; or return ``""``."""
    import torch

    start = broadcast.start
    if type(reply.posterior) is not type(start):
        return f"posterior is {type(reply.posterior).__name__}, not {type(start).__name__}"
    posterior, wanted = reply.posterior.pack(), start.pack()
    clients = len(reply.clients)
    for name, tensor in _tensors(reply, posterior).items():
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is {type(tensor).__name__}, no tensor"
        rows = len(tensor) if tensor.ndim else "no"
        if rows != clients:
            return f"{name} has {rows} rows for {clients} clients"
    for name, tensor in posterior.items():
        if tensor.shape[1:] != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape[1:])}, "
                f"not {wanted[name].dtype} {list(wanted[name].shape)}"
            )
    return _miscounted(reply)


def _miscounted(reply: LocalResult) -> str:
    """Say which of a client's two plain numbers is none; or return ``""``."""
    import torch

    for name, tensor in (("examples", reply.examples), ("loss", reply.loss)):
        if tensor.ndim != 1:
            return f"{name} is {list(tensor.shape[1:])} a client, not one number"
    if reply.examples.is_floating_point() or reply.examples.dtype == torch.bool:
        return f"examples is {reply.examples.dtype}, no count"
    return "" if reply.loss.is_floating_point() else f"loss is {reply.loss.dtype}, no real number"


def _tensors(reply: LocalResult, posterior: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "examples": reply.examples,
        "loss": reply.loss,
        **posterior,
        **{f"statistic {name}": tensor for name, tensor in reply.statistics.items()},
        **{f"memory {name}": tensor for name, tensor in reply.memory.items()},
    }


def _fault(result: LocalResult) -> str:
    """Say which value of one client's well-shaped result is not allowed, or return ``""``."""
    import torch

    examples, loss = int(result.examples[0]), float(result.loss[0])
    if not 0 < examples <= LARGEST:
        return f"examples is {examples}; a client that trained has at least one"
    if not abs(loss) <= LARGEST:
        return f"loss is {loss:g}"
    fields = result.posterior.pack()
    for name, tensor in _tensors(result, fields).items():
        if tensor.dtype == torch.bool:
            continue
        if not bool((tensor.abs() <= LARGEST).all()):
            finite = bool(tensor.isfinite().all())
            return f"{name} is " + (f"larger than {LARGEST:g}" if finite else "not finite")
    return result.posterior[0].fault()
