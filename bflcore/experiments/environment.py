"""The environment of a run: versions, and digests of what determines its results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.errors import OptionError, RunError
from bflcore.experiments.caveats import caveats
from bflcore.experiments.integrity import read_json
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch

    from bflcore.experiments.prepare import Prepared
    from bflcore.experiments.records import Record
    from bflcore.experiments.resolve import Experiment
    from bflcore.problem import Problem
    from bflcore.registry.loading import Registry
else:
    torch = lazy("torch")

__all__ = [
    "SETTINGS",
    "check_settings",
    "environment",
    "is_of",
    "machine",
    "settings_digest",
    "used_distributions",
]

SETTINGS = "experiment.toml"  # key among the fingerprints

# Settings that may differ when a run is resumed: its results do not depend on them.
MAY_CHANGE = ("engine", "checkpoint_every", "min_clients", "log")


def environment(prepared: Prepared, registry: Registry) -> Record:
    """Return versions, the machine, warnings, and digests of what determines the results."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": machine(),
        "torch": str(torch.__version__),
        "distributions": {d.name: d.version for d in registry.plugins},
        "warnings": caveats(prepared),
        "fingerprints": {
            SETTINGS: settings_digest(prepared.experiment.as_toml()),
            "the data or its partition": _data(prepared.problem),
            "the initial network": _digest([prepared.problem.initial]),
        },
        "sources": dict(prepared.sources),
    }


def machine() -> dict[str, Any]:
    """Return what this machine is: system, kind of processor, and number of cores."""
    return {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(named, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def used_distributions(experiment: Experiment, registry: Registry) -> set[str]:
    """Return the distributions whose components the experiment uses, the core's included."""
    names = [("method", experiment.method)]
    names += [(component.kind, component.name) for component in experiment.components()]
    found = {registry.plugins[0].name}  # the core
    for kind, name in names:
        with suppress(OptionError):  # the user's own model
            found.add(registry.owner(kind, name))
    return found


def check_settings(run: Path, values: Mapping[str, Any]) -> None:
    """Raise `RunError` unless the content of a run's ``experiment.toml`` is that of its results."""
    try:
        known = read_json(run / "environment.json")["fingerprints"][SETTINGS]
    except FileNotFoundError:
        return  # the run has not begun
    except (KeyError, TypeError):
        known = ""
    if not is_of(values, known):
        raise RunError(
            f"{run / 'experiment.toml'} is not what the run was started with; restore it, or "
            f"continue with the new settings: bfl resume {run} --force"
        )


def settings_digest(values: Mapping[str, Any]) -> str:
    """Return a digest of the settings that determine the results, as an experiment file has them.

    Of the engine that is how many clients train together, which decides the last bits. The folder
    that holds a data set is none of them.
    """
    data = {k: v for k, v in values.get("data", {}).items() if k != "data_dir"}
    return _digest_of_settings({**values, "data": data} if "data" in values else values)


def is_of(values: Mapping[str, Any], known: object) -> bool:
    """Return whether a run's digest is that of these settings."""
    return known in {settings_digest(values), _digest_of_settings(values)}


def _digest_of_settings(values: Mapping[str, Any]) -> str:
    """Return a digest of all settings, as runs of earlier versions have it."""
    chunk = dict(values.get("engine", {})).get("chunk", 0)
    found = {k: v for k, v in values.items() if k not in MAY_CHANGE} | {"chunk": chunk}
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _data(problem: Problem) -> str:
    """Return a digest of every client's samples, in order."""
    parts = problem.samples.values()
    return _digest(
        [tensor for part in parts for tensor in (part.x, part.y)],
        repr([(part.start, part.end) for part in parts]),
    )


def _digest(tensors: list[torch.Tensor], text: str = "") -> str:
    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().reshape(-1).view("uint8").data)
    return found.hexdigest()
