"""From a run's settings and the description of its data to a problem without samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.errors import OptionError, RunError
from bflcore.experiments.prepare import build_problem
from bflcore.experiments.resolve import CALIBRATOR, build_calibrators
from bflcore.models.user import load_factory
from bflcore.options import Component, build, options_of
from bflcore.options.settings import RunSettings
from bflcore.problem.base import Shares

if TYPE_CHECKING:
    from bflcore.experiments.description import Description
    from bflcore.inference.base import LocalInference
    from bflcore.problem import Problem
    from bflcore.registry.loading import Registry

__all__ = ["rebuild", "settings_of"]

# What of experiment.toml is needed to predict, besides the settings of the run.
NEEDED = ("method", "inference", "model", "likelihood")
OPTIONAL = (CALIBRATOR,)  # where there is any


def settings_of(values: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return what predictions need of the content of an ``experiment.toml``.

    Raises `RunError` naming `where` if it lacks a part.
    """
    missing = [name for name in NEEDED if name not in values]
    if missing:
        raise RunError(f"{where}: {missing[0]} is missing")
    needed = {declared.name for declared in options_of(RunSettings)} | {*NEEDED, *OPTIONAL}
    return {name: value for name, value in values.items() if name in needed}


def rebuild(
    registry: Registry,
    values: Mapping[str, Any],
    description: Description,
    device: str = "",
    sources: Path | None = None,
) -> tuple[Problem, LocalInference]:
    """Return the problem and the inference of a run, without its samples.

    `values` have the form of ``experiment.toml``, of which only what predictions need is read:
    other parts, the data set and the engine need not be installed. `sources` is the folder that
    keeps the module of the user's own network, which is executed. Raises `OptionError` if a
    component is not installed, or if the device is not available.
    """
    top = {declared.name for declared in options_of(RunSettings)} - {"log"}
    run = build(RunSettings, {k: v for k, v in values.items() if k in top}, "--")
    run = run.replace(device=device or run.device)
    model = values["model"]["name"]
    own = ":" in model
    problem = build_problem(
        run,
        load_factory(model, sources) if own else _component(registry, "model", values),
        _component(registry, "likelihood", values),
        *description.without_samples(),
        novel=description.novel,
    )
    # One row stands for the samples, whose shape and type some inferences ask for.
    x = problem.train.x.new_zeros(1, *problem.train.x.shape[1:])
    y = problem.train.y.new_zeros(1, *problem.train.y.shape[1:])
    ends = tuple(accumulate(client.train for client in description.clients)) or (0,)
    train = Shares(x, y, (0, *ends[:-1]), ends)
    calibrators = build_calibrators(registry, run.calibrate, values.get(CALIBRATOR, {}))
    problem = attrs.evolve(problem, train=train, calibrators=calibrators)
    return problem, _component(registry, "inference", values)


def _component(registry: Registry, kind: str, values: Mapping[str, Any]) -> Any:
    table = dict(values[kind])
    name = table.pop("name")
    try:
        cls: type[Component] = registry.of(kind)[name]
    except OptionError:
        cls = _preset(registry, kind, name, values)
    return build(cls, table, kind)


def _preset(registry: Registry, kind: str, name: str, values: Mapping[str, Any]) -> type[Component]:
    """Return a part that a method brings along without registering it."""
    part = registry.methods[str(values["method"])].parts().get(kind)
    if part is None or part.name != name:
        raise OptionError(
            f"{kind} {name} is not installed; install the distribution that the run's "
            "environment.json names, or see bfl list-plugins"
        )
    return type(part)
