"""The loss on a plane of parameters through a client's networks, from a finished run's checkpoint.

Reference: Garipov et al. 2018, appendix A.1: the plane through three networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.directory import RunDirectory
from bflcore.inference.base import Explorable
from bflcore.inference.memory import client_posterior

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.problem.base import Problem
    from bflcore.report.reading import Run

__all__ = ["Plane", "landscape"]

POINTS = 25  # along each side of the picture
MARGIN = 0.3  # of the picture around the networks, as a fraction of their extent
SAMPLES = 1024  # test samples at most
ON_A_LINE = 1e-4  # a smaller extent, relative to the other axis, is rounding error


@attrs.frozen(eq=False)
class Plane:
    """Metrics ``[up, across]`` on a plane, in units of Euclidean distance between networks.

    `marks` are the positions of the networks that span it.
    """

    client: int
    across: list[float]
    up: list[float]
    metrics: dict[str, list[list[float]]]
    marks: dict[str, tuple[float, float]]


def landscape(run: Run) -> Plane:
    """Measure the first client that has a memory.

    The plane goes through the one or two networks that the inference names
    (`Explorable.landmarks`) and the initialisation; a missing one is replaced by a random
    direction. Raises `RunError` when the checkpoint is missing or has diverged.
    """
    from bflcore.experiments.prepare import prepare
    from bflcore.experiments.resolve import resolve
    from bflcore.registry.loading import load_registry

    method = str(run.experiment["method"])
    prepared = prepare(resolve(load_registry(), method, run.experiment, {}))
    problem, inference = prepared.problem, prepared.experiment.inference
    family = type(inference.initial(problem))
    checkpoints = RunDirectory(run.path).checkpoints
    saved = checkpoints.read(family, problem.device)
    if saved is None:
        raise RunError(f"{checkpoints.folder} has no checkpoint; start the run again")
    problem = problem.surveyed(saved.broadcast.survey)
    client = min(saved.memories, default=problem.clients[0])
    memory = saved.memories.get(client) or inference.initial_memory(problem)
    stacked = {name: tensor[None] for name, tensor in memory.items()}
    cohort = problem.cohort([client], stacked, saved.broadcast.round)
    problem = problem.for_client(cohort, predicting=True)
    if isinstance(inference, Explorable):
        found = inference.landmarks(problem, saved.broadcast, cohort)
    else:
        found = {"client": client_posterior(problem, saved.broadcast, cohort).mean}
    networks = {label: network[0] for label, network in found.items()}
    networks["initialisation"] = problem.initial
    return _measure(problem, client, networks)


def _measure(problem: Problem, client: int, networks: dict[str, Tensor]) -> Plane:
    import torch

    x, y = (tensor[:SAMPLES] for tensor in problem.test.of(client))
    vectors = {label: vector.to(x.device) for label, vector in networks.items()}
    if not all(bool(vector.isfinite().all()) for vector in vectors.values()):
        raise RunError(f"client {client}'s network is not finite; no landscape can be drawn")
    origin, first, second = _axes(problem, list(vectors.values()))
    marks = {
        label: (float((v - origin) @ first), float((v - origin) @ second))
        for label, v in vectors.items()
    }
    across, up = _sides(list(marks.values()))
    with torch.no_grad():
        rows = [
            [_metrics(problem, origin + a * first + b * second, x, y) for a in across] for b in up
        ]
    metrics = {name: [[cell[name] for cell in row] for row in rows] for name in rows[0][0]}
    return Plane(client, across, up, metrics, marks)


def _axes(problem: Problem, vectors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return an origin and two orthonormal directions (Gram and Schmidt)."""
    from bflcore.randomness import SERVER, stream

    origin, *others = vectors
    noise = stream(problem.seed, SERVER, SERVER, "landscape", origin.device)
    random = origin.new_empty(2, len(origin)).normal_(generator=noise)
    basis: list[Tensor] = []
    for direction in (*(other - origin for other in others), *random):
        rest = direction
        for one in basis:
            rest = rest - (rest @ one) * one
        # Of networks that coincide, or lie on one line, nothing is left but rounding errors.
        if len(basis) < 2 and float(rest.norm()) > ON_A_LINE * float(direction.norm() + 1e-12):
            basis.append(rest / rest.norm())
    return origin, basis[0], basis[1]


def _sides(marks: list[tuple[float, float]]) -> list[list[float]]:
    """Return the coordinates of the grid along both axes.

    Where the networks lie on one line, rounding errors apart, the picture is square.
    """
    places = [list(axis) for axis in zip(*marks, strict=True)]
    extents = [max(axis) - min(axis) for axis in places]
    largest = max(extents) or 1.0
    sides = []
    for axis, extent in zip(places, extents, strict=True):
        middle = (max(axis) + min(axis)) / 2
        reach = (0.5 + MARGIN) * (extent if extent > ON_A_LINE * largest else largest)
        sides.append([middle + reach * (2 * i / (POINTS - 1) - 1) for i in range(POINTS)])
    return sides


def _metrics(problem: Problem, network: Tensor, x: Tensor, y: Tensor) -> dict[str, Any]:
    outputs = problem.forward(network[None], x[None])[0]
    found = {"nll": float(problem.likelihood.nll(outputs, y).mean())}
    if problem.likelihood.task == "classification":
        probabilities = problem.likelihood.predictive(outputs[None, None]).mean[0]
        found["accuracy"] = float((probabilities.argmax(-1) == y).float().mean())
    return found
