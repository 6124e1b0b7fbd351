"""``bfl flower``: export an experiment to Flower's servers and nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bflcore.cli.run import experiment_flags, resolved
from bflcore.registry.loading import load_registry

__all__ = ["flower"]


@click.group("flower")
def flower() -> None:
    """Run experiments on Flower's servers and nodes."""


@flower.command("export", context_settings={"max_content_width": 100})
@click.argument("folder", type=click.Path(path_type=Path))
@experiment_flags
@click.option("--without-data", is_flag=True, help="Leave the clients' samples out.")
def export(folder: Path, without_data: bool, **given: Any) -> None:
    """Write a Flower app that runs METHOD, or an experiment.toml, into FOLDER.

    The flags are those of bfl run. Each client's samples are written to FOLDER/nodes, for a trial
    on one machine or to be copied to the nodes; a node can also use a data file of its own.
    """
    from bfl_flower import export as writing
    from bflcore.experiments.prepare import prepare

    registry = load_registry()
    experiment = resolved(registry, **given | {"engine": given["engine"] or "flower"})
    prepared = prepare(experiment)
    writing.refuse(prepared)
    writing.export(folder, prepared, registry, with_data=not without_data)
    click.echo(f"app: {folder}\nhow to run it: {folder / 'README.md'}")
