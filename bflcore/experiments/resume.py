"""Opening a run again: its experiment, prepared as it was when the run began."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import Prepared, prepare
from bflcore.experiments.resolve import method_of, read, resolve

if TYPE_CHECKING:
    from bflcore.data.tables import Table
    from bflcore.data.user import Arrays
    from bflcore.registry.loading import Registry

__all__ = ["reopen"]


def reopen(
    path: Path, registry: Registry, given: Table | Arrays | None = None
) -> tuple[Prepared, RunDirectory, list[str]]:
    """Return the experiment of a run, its directory, and what has changed since it began.

    `given` are the data of a run whose data Python held. Raises `BflError` if it cannot continue.
    """
    directory = RunDirectory.open(path)
    sys.path.append(str(directory.sources.absolute()))  # for an own network that is gone
    file = read(path / "experiment.toml")
    method = method_of(file, path / "experiment.toml")
    prepared = prepare(resolve(registry, method, file, {}), given)
    return prepared, directory, directory.changes(prepared, registry)
