"""Small problems, and small parts to solve them: what the checks run on.

In float64 unless a check says otherwise, so that two ways to compute the same may be compared to
rounding; clients hold 9, 6 and 3 samples, so that every cohort is ragged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from bflcore.inference.base import LocalInference
from bflcore.layout import Layout
from bflcore.messages import Broadcast, Cohort, LocalResult
from bflcore.options import Component, options_of
from bflcore.problem.base import Problem, Shares
from bflcore.problem.likelihoods import Categorical, Likelihood

if TYPE_CHECKING:
    from bflcore.posteriors import Posterior

__all__ = [
    "begun",
    "clients_of",
    "copied",
    "different",
    "families",
    "generator",
    "made",
    "problem",
    "row",
    "same",
    "shapes",
    "tensors",
]

C = TypeVar("C", bound=Component)

SIZES = (9, 6, 3)
QUICK: dict[str, object] = {"local_epochs": 2, "batch_size": 4, "lr": 0.01}


def made(part: type[C], **options: object) -> C:
    """Return a part that works quickly: `QUICK` options where it has them, then `options`."""
    known = {option.name for option in options_of(part)}
    return part(**{name: value for name, value in (QUICK | options).items() if name in known})


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def problem(
    sizes: Sequence[int] = SIZES,
    sharing: str = "all",
    dtype: torch.dtype = torch.float64,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    data: tuple[Tensor, Tensor] | None = None,
) -> Problem:
    """Return a problem of three classes, four features and a net of one hidden layer."""
    noise = generator(1)
    network = network or nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for parameter in network.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    network = network.to(dtype)
    if data is None:
        y = torch.randint(3, (sum(sizes),), generator=noise)
        x = torch.randn(sum(sizes), 4, generator=noise, dtype=torch.float64)
        x[:, :3] += 2 * nn.functional.one_hot(y, 3)
        data = (x, y)
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in data)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    shares = Shares.gather(x, y, [range(e - n, e) for e, n in zip(ends, sizes, strict=True)])
    layout = Layout.of(network, "2", sharing)
    return Problem(
        network,
        layout,
        likelihood or Categorical(),
        shares,
        shares,
        layout.flatten(dict(network.named_parameters())),
        tuple(range(len(sizes))),
    )


def begun(inference: LocalInference, of: Problem) -> Broadcast:
    """Return the first broadcast."""
    from bflcore.rounds import Recipe, begin

    return begin(Recipe(inference, None, None, None), of)  # type: ignore[arg-type]


def clients_of(
    of: Problem,
    inference: LocalInference,
    clients: Sequence[int] | None = None,
    memory: Mapping[str, Tensor] | None = None,
    round: int = 0,
) -> Cohort:
    """Return clients (all of them by default) who never took part, or with their `memory`."""
    chosen = tuple(of.clients if clients is None else clients)
    fresh = inference.initial_memory(of)
    stacked = {name: torch.stack([tensor] * len(chosen)) for name, tensor in fresh.items()}
    return of.cohort(chosen, stacked if memory is None else memory, round)


def tensors(thing: Any) -> dict[str, Tensor]:
    """Return every tensor inside a posterior, a broadcast, a cohort, a result or a mapping."""
    from bflcore.posteriors import Posterior

    if isinstance(thing, Tensor):
        return {"": thing}
    if isinstance(thing, Posterior):
        return thing.pack()
    if isinstance(thing, Mapping):
        parts = dict(thing)
    elif attrs.has(type(thing)):
        parts = {field.name: getattr(thing, field.name) for field in attrs.fields(type(thing))}
    else:
        return {}
    return {
        f"{name}.{inner}".strip("."): tensor
        for name, part in parts.items()
        for inner, tensor in tensors(part).items()
    }


def copied(*things: Any) -> list[dict[str, Tensor]]:
    """Return copies of all tensors inside `things`, to be compared with them later."""
    return [{name: t.clone() for name, t in tensors(thing).items()} for thing in things]


def same(found: Any, expected: Any, what: str, tolerance: float = 1e-9) -> None:
    """Require two things to hold the same tensors: shapes, dtypes, and values to `tolerance`."""
    if fault := different(found, expected, tolerance):
        raise AssertionError(f"{what}: {fault}")


def different(found: Any, expected: Any, tolerance: float = 0.0) -> str:
    """Say how the tensors of two things differ, or return ``""``."""
    left, right = tensors(found), tensors(expected)
    if left.keys() != right.keys():
        return f"{sorted(left)} instead of {sorted(right)}"
    for name, tensor in left.items():
        wanted = right[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape)}, "
                f"not {wanted.dtype} {list(wanted.shape)}"
            )
        close = torch.isclose(
            tensor.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
        if not bool(close.all()):
            where = tuple((~close).nonzero()[0].tolist())
            return f"{name}{list(where)} is {tensor[where]:.9g}, not {wanted[where]:.9g}"
    return ""


def shapes(thing: Any) -> dict[str, str]:
    """Return dtype and shape of every tensor inside `thing`, to be compared and shown."""
    kinds = {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors(thing).items()
    }
    return {name: f"{kinds[name]} {list(t.shape)}" for name, t in tensors(thing).items()}


def row(result: LocalResult, index: int) -> LocalResult:
    """Return one client's part of a result."""
    return result.select([index])


def families(part: Any) -> list[type[Posterior]]:
    """Return the posterior families that a part declares to know, of those installed."""
    from bflcore.registry.loading import load_registry

    installed = load_registry().posteriors.values()
    known = [family for family in installed if not part.families or family.name in part.families]
    if not known:  # nothing to check would look like nothing wrong
        raise AssertionError(
            f"families are {part.families}, of which none is installed; installed: "
            f"{', '.join(family.name for family in installed)}"
        )
    return known
