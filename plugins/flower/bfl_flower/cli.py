"""``bfl flower``: export an experiment to Flower's servers and nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bflcore.cli.run import experiment_flags, resolved
from bflcore.errors import OptionError
from bflcore.options import options_of
from bflcore.options.settings import DataSettings
from bflcore.registry.loading import load_registry

__all__ = ["flower"]


@click.group("flower")
def flower() -> None:
    """Run experiments on Flower's servers and nodes."""


@flower.command("export", context_settings={"max_content_width": 100})
@click.argument("folder", type=click.Path(path_type=Path))
@experiment_flags
@click.option("--without-data", is_flag=True, help="Leave the clients' samples out.")
@click.option("--shape", metavar="N,...", help="shape of a sample, instead of a data set: 10")
@click.option("--outputs", type=int, help="with --shape: number of classes, or of targets")
@click.option(
    "--standardise", is_flag=True, help="with --shape: scale features by sums over the clients"
)
def export(
    folder: Path,
    without_data: bool,
    shape: str | None,
    outputs: int | None,
    standardise: bool,
    **given: Any,
) -> None:
    """Write a Flower app that runs METHOD, or an experiment.toml, into FOLDER.

    The flags are those of bfl run. Each client's samples are written to FOLDER/nodes, for a trial
    on one machine or to be copied to the nodes; a node can also use a data file of its own. With
    --shape, --outputs and --clients (and --task), no data set is needed here.
    """
    from bfl_flower import export as writing
    from bfl_flower.app import without_samples
    from bflcore.experiments.prepare import assemble, prepare

    registry = load_registry()
    given |= {"engine": given["engine"] or "flower"}
    if shape is None:
        if outputs is not None or standardise:
            raise OptionError("--outputs and --standardise need --shape; give it, too")
        prepared = prepare(resolved(registry, **given))
        form = writing.form_of(prepared)
    else:
        form = {
            "name": "samples",
            "task": given["task"] or "classification",
            "shape": _shape(shape),
            "outputs": _outputs(outputs, given["task"]),
            "standardise": standardise,
        }
        _refuse_data(given)
        # Each node has a file of its own.
        experiment = resolved(registry, **given | {"data": "samples.npz"})
        prepared = assemble(experiment, *without_samples(form, experiment))
    writing.refuse(prepared, form)
    with_data = shape is None and not without_data
    writing.export(folder, prepared, registry, form, with_data=with_data)
    click.echo(f"app: {folder}\nhow to run it: {folder / 'README.md'}")


def _shape(text: str) -> list[int]:
    sides = [int(side) if side.strip().isdecimal() else 0 for side in text.split(",")]
    if min(sides) < 1:
        raise OptionError(
            f"--shape: {text!r} is not allowed; allowed: numbers above 0, for example 10 or 1,28,28"
        )
    return sides


def _outputs(outputs: int | None, task: str | None) -> int:
    least = 1 if task == "regression" else 2
    if outputs is None or outputs < least:
        said = "is missing" if outputs is None else f"{outputs} is not allowed"
        raise OptionError(f"--outputs: {said}; with --shape, give at least {least}")
    return outputs


def _refuse_data(given: dict[str, Any]) -> None:
    """Refuse flags that need the samples, where there are none."""
    kept = {"clients", "novel_clients", "input_range", "task"}
    kept |= {"validation_fraction", "calibration_fraction"}  # the nodes hold these out
    for option in options_of(DataSettings):
        if option.name not in kept and given.get(option.name):
            flag = option.name.replace("_", "-")
            raise OptionError(f"--{flag}: has no effect with --shape; leave one of the two out")
