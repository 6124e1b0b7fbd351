"""``bfl resume``: continue a run exactly where it stopped."""

from __future__ import annotations

from pathlib import Path

import click

from bflcore.cli.execution import execute_and_report
from bflcore.cli.run import JSON, QUIET
from bflcore.errors import RunError
from bflcore.registry.loading import load_registry

__all__ = ["commands"]


@click.command("resume")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="resume even if data, versions or settings changed")
@QUIET
@JSON
def resume(run: Path, force: bool, quiet: bool, as_json: bool) -> None:
    """Continue the run in the folder RUN exactly where it stopped."""
    from bflcore.experiments.resume import reopen

    registry = load_registry()
    prepared, directory, changes = reopen(run, registry)
    reached = directory.checkpoints.reached or 0
    if changes and not force:
        raise RunError(
            f"cannot resume {run} unchanged: {'; '.join(changes)}; restore it, or pass --force"
        )
    finished = reached >= prepared.experiment.run.rounds and (run / "summary.json").exists()
    if finished and directory.checkpoints.sound():
        click.echo(f"{run} is finished ({reached} rounds). Write its report with: bfl report {run}")
        return
    directory.describe(prepared)  # a run of an earlier version has no data.json
    if changes:
        directory.note_changes(changes, prepared, registry, reached)
        click.echo(f"resuming despite changes: {'; '.join(changes)}", err=True)
    execute_and_report(prepared, directory, quiet=quiet, as_json=as_json)


commands = (resume,)
