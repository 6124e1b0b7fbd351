"""The environment of a run: versions, and digests of what determines its results."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from bflcore.errors import OptionError
from bflcore.experiments.caveats import caveats
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

__all__ = ["environment", "used_distributions"]

# Settings that may differ when a run is resumed: its results do not depend on them.
MAY_CHANGE = ("engine", "checkpoint_every", "min_clients", "log")


def environment(prepared: Prepared, registry: Registry) -> Record:
    """Return versions, warnings, and digests of what determines the results."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "distributions": {d.name: d.version for d in registry.plugins},
        "warnings": caveats(prepared),
        "fingerprints": {
            "experiment.toml": _settings(prepared.experiment),
            "the data or its partition": _data(prepared.problem),
            "the initial network": _digest([prepared.problem.initial]),
        },
    }


def used_distributions(experiment: Experiment, registry: Registry) -> set[str]:
    """Return the distributions whose components the experiment uses, the core's included."""
    names = [("method", experiment.method)]
    names += [(component.kind, component.name) for component in experiment.components()]
    found = {registry.plugins[0].name}  # the core
    for kind, name in names:
        with suppress(OptionError):  # the user's own model
            found.add(registry.owner(kind, name))
    return found


def _settings(experiment: Experiment) -> str:
    """Return a digest of the settings that determine the results."""
    values = {k: v for k, v in experiment.as_toml().items() if k not in MAY_CHANGE}
    # How many clients train together decides the last bits of the results, nothing else does.
    values["chunk"] = getattr(experiment.engine, "chunk", 0)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


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
