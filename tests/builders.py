"""Small problems and what clients would send, for the tests of the core.

Everything is drawn from generators of its own and in float64 unless a test says otherwise, so
that two ways to compute the same thing may be compared to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bflcore import Broadcast, Cohort, Gaussian, Layout, LocalResult, Point, Problem
from bflcore.inference.base import LocalInference
from bflcore.problem.base import Shares
from bflcore.problem.likelihoods import Categorical, GaussianNoise, Likelihood

IMAGE = (2, 4, 4)  # what the convolutional network sees


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def dense(inputs: int = 3, outputs: int = 2) -> nn.Module:
    """Two linear layers; the head is ``2``."""
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def convolutional(outputs: int = 2) -> nn.Module:
    """A convolution, a group norm and a linear head (``4``), on images of 4x4."""
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
    """Return a problem of two outputs in which client k holds ``sizes[k]`` samples."""
    network = (network or dense(*shape)).to(dtype)
    for offset, parameter in enumerate(network.parameters()):
        parameter.data = 0.5 * normal(*parameter.shape, seed=100 + offset, dtype=dtype)
    likelihood = likelihood or Categorical()
    x = normal(sum(sizes), *shape, seed=1, dtype=dtype)
    if isinstance(likelihood, GaussianNoise):
        y = normal(sum(sizes), 2, seed=2, dtype=dtype)
    else:
        y = torch.randint(2, (sum(sizes),), generator=generator(2))
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    shares = Shares.gather(x, y, [range(e - n, e) for e, n in zip(ends, sizes, strict=True)])
    layout = Layout.of(network, head, sharing)
    return Problem(
        network,
        layout,
        likelihood,
        shares,
        shares,
        layout.flatten(dict(network.named_parameters())),
        tuple(k for k in range(len(sizes)) if k not in novel),
        tuple(novel),
        seed,
    )


def first_broadcast(inference: LocalInference, of: Problem, round: int = 0) -> Broadcast:
    """Return what the server sends first."""
    return Broadcast(
        round,
        inference.initial(of).split(of.layout)[0],
        inference.prior(of).split(of.layout)[0],
    )


def cohort(
    of: Problem, inference: LocalInference, clients: Sequence[int] | None = None, round: int = 0
) -> Cohort:
    """Return clients, in falling order of size, who never took part."""
    chosen = range(len(of.train.start)) if clients is None else clients
    ordered = sorted(chosen, key=lambda client: -of.train.size(client))
    memory = {
        name: torch.stack([tensor] * len(ordered))
        for name, tensor in inference.initial_memory(of).items()
    }
    return of.cohort(ordered, memory, round)


def reply(
    clients: Sequence[int],
    posterior: Point | Gaussian,
    *,
    examples: Sequence[int] | None = None,
    loss: Sequence[float] | None = None,
    statistics: Mapping[str, Tensor] | None = None,
) -> LocalResult:
    """Return what a client engine would hand to the server."""
    return LocalResult(
        tuple(clients),
        posterior,
        torch.tensor(examples or [10 * (client + 1) for client in clients]),
        torch.tensor(loss or [1.0] * len(clients), dtype=torch.float64),
        statistics or {},
    )


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Gaussian:
    """Return a Gaussian with means around 0 and variances around 1."""
    mean = normal(*shape, seed=seed, dtype=dtype)
    return Gaussian(mean, normal(*shape, seed=seed + 1, dtype=dtype).exp())
