"""Checks of methods: their parts are registered and fit each other, and they run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bflcore.experiments.resolve import resolve
from bflcore.methods import Method
from bflcore.options import options_of
from bflcore.options.kinds import kind_called
from bflcore.registry import builtin
from bflcore.registry.loading import Plugin, Registry, read_plugins
from bflcore.testing.problems import QUICK

__all__ = ["checks_of"]

Part = type[Method]


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of a method."""
    yield from (parts_exist_and_fit, runs_two_rounds)


def parts_exist_and_fit(part: Part) -> None:
    """The parts are registered under their names and fit each other."""
    registry = _registry(part)
    for kind, chosen in part.parts().items():
        if registry.of(kind).get(chosen.name) is not type(chosen):
            raise AssertionError(
                f"{kind} {chosen.name} is not registered; yield {type(chosen).__name__} from "
                f"{kind_called(kind).hook}"
            )
    resolve(registry, part.name, {}, {})


def runs_two_rounds(part: Part) -> None:
    """Two rounds on a small synthetic data set end with metrics that are finite numbers."""
    from bflcore.experiments.directory import RunDirectory
    from bflcore.experiments.prepare import prepare
    from bflcore.experiments.run import execute

    registry = _registry(part)
    known = {option.name for option in options_of(type(part.inference))}
    flags: Any = {
        "rounds": 2,
        "cohort": 3,  # all of them: a method may ask for more than there are here
        "data": {"data": "synthetic", "clients": 3, "train_per_class": 6, "test_per_class": 6},
        "inference": {name: value for name, value in QUICK.items() if name in known},
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(registry, part.name, {}, flags))
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory.create(Path(folder) / "run", prepared, registry)
        summary = execute(prepared, directory)
    if summary["dropped"]:
        first = summary["dropped"][0]
        raise AssertionError(f"client {first['client']} was dropped: {first['reason']}")
    for name in ("nll", "accuracy"):
        value = summary["final"][f"personal.{name}"]["mean"]
        if not math.isfinite(value):
            raise AssertionError(
                f"personal.{name} after two rounds is {value}, not a finite number"
            )


def _registry(part: Part) -> Registry:
    """Return the registry, with the method added if it is not installed."""
    registry = read_plugins(builtin)
    if part not in registry.methods.values():
        registry.add(Plugin("under test", "0", part.__module__), [part])
    return registry
