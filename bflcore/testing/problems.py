"""Toy problems, and toy components to solve them: for the conformance kit and for tests.

Everything is drawn from generators with fixed seeds and is float64 unless told otherwise, so that
two ways of computing the same thing can be compared up to rounding. Clients differ in size, so
that every cohort is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from bflcore.engines.base import Session
from bflcore.engines.local import Local
from bflcore.experiments.surveys import survey
from bflcore.inference.base import LocalInference
from bflcore.layout import Layout
from bflcore.messages import SURVEY, Broadcast, Cohort, LocalResult
from bflcore.options import Component, options_of
from bflcore.posteriors import Gaussian, Posterior
from bflcore.problem.base import Problem, Shares
from bflcore.problem.likelihoods import Categorical, GaussianNoise, Likelihood

if TYPE_CHECKING:
    from bflcore.engines.base import EvaluationReply, FitReply, SurveyReply
    from bflcore.posteriors import Point

__all__ = [
    "IMAGE",
    "QUICK",
    "SIZES",
    "Replies",
    "assert_same",
    "build",
    "cohort",
    "companions",
    "convolutional",
    "copies",
    "dense",
    "difference",
    "families",
    "first_broadcast",
    "gaussian",
    "generator",
    "normal",
    "problem",
    "reply",
    "separable",
    "shapes",
    "tensors",
]

C = TypeVar("C", bound=Component)

SIZES = (9, 6, 3)  # samples per client of `separable`
IMAGE = (2, 4, 4)  # shape of an input of `convolutional`
QUICK: dict[str, object] = {"local_epochs": 2, "batch_size": 4, "lr": 0.01, "predict_draws": 4}


class Replies(Session):
    """Clients whose replies are known beforehand; `stored` lists those whose result was kept.

    `answers` are the replies to the survey.
    """

    def __init__(self, *replies: FitReply, answers: Sequence[SurveyReply] = ()) -> None:
        self.replies, self.stored = replies, list[int]()
        self.answers = answers

    def survey(self, known: Mapping[str, Tensor], clients: Sequence[int]) -> Iterator[SurveyReply]:
        """Yield the answers, whatever is asked and `known` ``[...]``."""
        yield from self.answers

    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        """Yield the replies, whatever is asked."""
        yield from self.replies

    def store(self, result: LocalResult) -> None:
        """Note the clients."""
        self.stored.extend(result.clients)

    def evaluate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[EvaluationReply]:
        """Yield nothing."""
        return iter(())


def build(part: type[C], **options: object) -> C:
    """Build a component that trains quickly: `QUICK` where it has these options, then `options`."""
    known = {option.name for option in options_of(part)}
    return part(**{name: value for name, value in (QUICK | options).items() if name in known})


def generator(seed: int = 0) -> torch.Generator:
    """Return a new generator."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw standard normal numbers ``[*shape]``; every dtype gets the same ones."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Gaussian:
    """Draw a Gaussian with means around 0 and variances around 1, each ``[*shape]``."""
    mean = normal(*shape, seed=seed, dtype=dtype)
    return Gaussian(mean, normal(*shape, seed=seed + 1, dtype=dtype).exp())


def dense(inputs: int = 3, outputs: int = 2) -> nn.Module:
    """Return two linear layers; the head is ``2``."""
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def convolutional(outputs: int = 2) -> nn.Module:
    """Return a convolution, a group norm and a linear head (``4``) for images of shape `IMAGE`."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.GroupNorm(1, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, outputs),
    )


def problem(
    network: nn.Module | None = None,
    sizes: Sequence[int] = (7, 5, 2),
    shape: Sequence[int] = (3,),
    *,
    head: str = "2",
    sharing: str = "all",
    likelihood: Likelihood | None = None,
    novel: Sequence[int] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Return a problem with two outputs and random targets; client k holds ``sizes[k]`` samples.

    Inputs are ``[N, *shape]``; the default network is `dense`.
    """
    network = (network or dense(*shape)).to(dtype)
    for offset, parameter in enumerate(network.parameters()):
        parameter.data = 0.5 * normal(*parameter.shape, seed=100 + offset, dtype=dtype)
    likelihood = likelihood or Categorical()
    x = normal(sum(sizes), *shape, seed=1, dtype=dtype)
    if isinstance(likelihood, GaussianNoise):
        y = normal(sum(sizes), 2, seed=2, dtype=dtype)
    else:
        y = torch.randint(2, (sum(sizes),), generator=generator(2))
    return _divided(network, head, sharing, likelihood, (x, y), sizes, tuple(novel), seed)


def separable(
    sizes: Sequence[int] = SIZES,
    sharing: str = "all",
    dtype: torch.dtype = torch.float64,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    data: tuple[Tensor, Tensor] | None = None,
) -> Problem:
    """Return a problem that can be learnt: three classes, features ``[N, 4]``, one hidden layer.

    `data` ``[N, ...]``, ``[N]`` replaces features and classes.
    """
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
    return _divided(network, "2", sharing, likelihood or Categorical(), (x, y), sizes, (), 0)


def _divided(
    network: nn.Module,
    head: str,
    sharing: str,
    likelihood: Likelihood,
    data: tuple[Tensor, Tensor],
    sizes: Sequence[int],
    novel: tuple[int, ...],
    seed: int,
) -> Problem:
    """Give client k the next ``sizes[k]`` samples; test on what was trained on."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    shares = Shares.gather(*data, [range(e - n, e) for e, n in zip(ends, sizes, strict=True)])
    layout = Layout.of(network, head, sharing)
    return Problem(
        network,
        layout,
        likelihood,
        shares,
        shares,
        layout.flatten(dict(network.named_parameters())),
        tuple(k for k in range(len(sizes)) if k not in novel),
        novel,
        seed,
    )


def surveyed(inference: LocalInference, of: Problem) -> Problem:
    """Return the problem after the survey of its training clients."""
    with Local(workers=1).open(of, inference, bins=1) as session:
        return of.surveyed(survey(inference, of, session).sums)


def first_broadcast(inference: LocalInference, of: Problem, round: int = 0) -> Broadcast:
    """Return what the server sends first, with the survey's sums if there was one."""
    prior = inference.prior(of).split(of.layout)[0]
    return Broadcast(
        round,
        inference.initial(of).split(of.layout)[0],
        prior,
        {f"{SURVEY}{name}": tensor for name, tensor in of.survey.items()},
        prior,
    )


def cohort(
    of: Problem,
    inference: LocalInference,
    clients: Sequence[int] | None = None,
    memory: Mapping[str, Tensor] | None = None,
    round: int = 0,
) -> Cohort:
    """Return `clients` in the order given, by default all of them, the largest first.

    They have never taken part, unless their `memory` ``[K, ...]`` is given.
    """
    if clients is None:
        clients = sorted(range(len(of.train.start)), key=lambda client: -of.train.size(client))
    if memory is None:
        fresh = inference.initial_memory(of)
        memory = {name: torch.stack([tensor] * len(clients)) for name, tensor in fresh.items()}
    return of.cohort(clients, memory, round)


def reply(
    clients: Sequence[int],
    posterior: Point | Gaussian,
    *,
    examples: Sequence[int] | None = None,
    loss: Sequence[float] | None = None,
    statistics: Mapping[str, Tensor] | None = None,
) -> LocalResult:
    """Return what a session hands to the server: a posterior and statistics ``[K, ...]``."""
    return LocalResult(
        tuple(clients),
        posterior,
        torch.tensor(examples or [10 * (client + 1) for client in clients]),
        torch.tensor(loss or [1.0] * len(clients), dtype=torch.float64),
        statistics or {},
    )


def tensors(thing: Any) -> dict[str, Tensor]:
    """Return every tensor ``[...]`` inside a posterior, broadcast, result, list or mapping."""
    if isinstance(thing, Tensor):
        return {"": thing}
    if isinstance(thing, Posterior):
        return thing.pack()
    if isinstance(thing, Mapping):
        parts = dict(thing)
    elif isinstance(thing, list | tuple):
        parts = {str(number): part for number, part in enumerate(thing)}
    elif attrs.has(type(thing)):
        parts = {field.name: getattr(thing, field.name) for field in attrs.fields(type(thing))}
    else:
        return {}
    return {
        f"{name}.{inner}".strip("."): tensor
        for name, part in parts.items()
        for inner, tensor in tensors(part).items()
    }


def copies(*things: Any) -> list[dict[str, Tensor]]:
    """Copy all tensors ``[...]`` inside `things`, to compare them later."""
    return [{name: t.clone() for name, t in tensors(thing).items()} for thing in things]


def assert_same(found: Any, expected: Any, what: str, tolerance: float = 1e-9) -> None:
    """Require two things to hold the same tensors: shapes, dtypes, and values to `tolerance`."""
    if fault := difference(found, expected, tolerance):
        raise AssertionError(f"{what}: {fault}")


def difference(found: Any, expected: Any, tolerance: float = 0.0) -> str:
    """Say how the tensors of two things differ; return ``""`` if they do not."""
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
    """Return dtype and shape of every tensor inside `thing` as text."""
    kinds = {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors(thing).items()
    }
    return {name: f"{kinds[name]} {list(t.shape)}" for name, t in tensors(thing).items()}


def companions(part: Any, kind: str) -> list[Any]:
    """Return the components of a kind with which a part is checked: the core's, and its package's.

    What else is installed does not change the outcome of a check.
    """
    from bflcore.registry.loading import load_registry

    packages = {"bflcore", part.__module__.partition(".")[0]}
    found = load_registry().of(kind).values()
    return [one for one in found if one.__module__.partition(".")[0] in packages]


def families(part: Any) -> list[type[Posterior]]:
    """Return the posterior families that a component says it supports; if any, `companions`."""
    from bflcore.registry.loading import load_registry

    installed = load_registry().posteriors
    known = [installed[name] for name in part.families if name in installed]
    if not part.families:
        known = companions(part, "posterior")
    if not known:  # nothing to check would look like nothing wrong
        raise AssertionError(
            f"families are {part.families}, of which none is installed; installed: "
            f"{', '.join(installed)}"
        )
    return known
