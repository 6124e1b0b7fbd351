"""Cells whose runs take a fraction of a second, and results made by hand."""

from __future__ import annotations

from bflcore.studies.cells import Cell
from bflcore.studies.results import Results
from bflcore.studies.trials import Trial

FLAGS = {
    "data": "synthetic",
    "partition": "natural",
    "clients": 3,
    "rounds": 2,
    "eval_every": 1,
    "local_epochs": 1,
}
OPTIONS = {"dataset.owners": 3, "dataset.samples": 20, "dataset.features": 6, "model.hidden": (5,)}
WORDS = (
    *("--data", "synthetic", "--partition", "natural", "--clients", "3", "--rounds", "2"),
    *("--eval-every", "1", "--local-epochs", "1", "-o", "dataset.owners=3"),
    *("-o", "dataset.samples=20", "-o", "dataset.features=6", "-o", "model.hidden=5"),
)


def cell(name, method="fedavg", flags=None, options=None, **point):
    return Cell(name, method, FLAGS | (flags or {}), OPTIONS | (options or {}), point)


def trial(name, seed, **metrics):
    """Return a finished run; a keyword ``personal__nll`` is the metric ``personal.nll``."""
    named = {key.replace("__", "."): value for key, value in metrics.items()}
    found = {key: {"mean": v, "std": 0.0, "pooled": v + 1} for key, v in named.items()}
    return Trial(name, seed, f"bfl run {name}", found, {"up": 1, "down": 2}, seconds=1.0)


def results(values, metric="personal__accuracy", **points):
    """Return results with the values of each cell by seed."""
    cells = tuple(Cell(name, "fedavg", {}, {}, points.get(name, {})) for name in values)
    trials = tuple(
        trial(name, seed, **{metric: value})
        for name, found in values.items()
        for seed, value in enumerate(found)
    )
    seeds = tuple(range(max(map(len, values.values()))))
    return Results(cells, seeds, trials)
