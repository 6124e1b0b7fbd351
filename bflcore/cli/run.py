"""``bfl run``: run a method or an experiment file, with live progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bflcore.api.flags import SHORT, resolve_flags
from bflcore.cli.execution import execute_and_report
from bflcore.experiments.compatibility import ignored
from bflcore.experiments.resolve import method_of, read
from bflcore.options import Component, Option, label, options_of
from bflcore.options.kinds import KINDS
from bflcore.options.settings import DataSettings, RunSettings
from bflcore.options.text import read_value, value_text
from bflcore.registry.loading import load_registry

if TYPE_CHECKING:
    from bflcore.experiments.resolve import Experiment, Values
    from bflcore.registry.loading import Registry

__all__ = [
    "JSON",
    "QUIET",
    "commands",
    "experiment_flags",
    "resolved",
]

# What chooses a part where the user does not.
UNCHOSEN = {kind.name: f"the method's, or {kind.default}" for kind in KINDS if kind.default}
UNCHOSEN["likelihood"] = "the one for the data's task"

QUIET = click.option("--quiet", is_flag=True, help="print nothing but warnings and errors")
JSON = click.option("--json", "as_json", is_flag=True, help="print summary.json at the end")


class OptionValue(click.ParamType):  # type: ignore[type-arg]  # generic in new versions only
    """The values of one option, read from text by the option's type."""

    name = "value"

    def __init__(self, declared: Option) -> None:
        self.declared = declared

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the typed value. Raises `OptionError` with what is allowed."""
        if not isinstance(value, str):
            return value
        return read_value(value, self.declared.type, label("--", self.declared.name))


def _settings_flags(cls: type[Component]) -> Callable[[Any], Any]:
    """Give a command a flag for every setting of a class."""

    def decorate(command: Any) -> Any:
        for declared in reversed(options_of(cls)):
            add = click.option(
                label("--", declared.name),
                help=_help(declared.help, _shown(declared), declared.allowed, _listed(declared)),
                default=None,
                **_form(declared),
            )
            command = add(command)
        return command

    return decorate


def _form(declared: Option) -> dict[str, Any]:
    if declared.type is bool:
        return {"is_flag": True}
    return {"type": OptionValue(declared), "metavar": "VALUE"}


def _listed(declared: Option) -> str:
    """Say which command lists the components that a setting names."""
    kinds = {kind.setting or kind.listed: kind.name for kind in KINDS}
    return f"bfl list {kinds[declared.name]}" if declared.name in kinds else ""


def _shown(declared: Option) -> str:
    """Return the default of an option as it is typed."""
    return value_text(declared.default) or "none"


def _help(text: str, default: str, allowed: str = "", listed: str = "") -> str:
    notes = [allowed, f"default: {default}", f"see {listed}" if listed else ""]
    return f"{text} [{'; '.join(filter(None, notes))}]"


def _part_flags(command: Any) -> Any:
    for flag, (part, _, text) in reversed(SHORT.items()):
        help_text = _help(text, f"the {part}'s")
        command = click.option(f"--{flag}", metavar="VALUE", help=help_text)(command)
    for kind in (kind for kind in reversed(KINDS) if kind.part):
        default = UNCHOSEN.get(kind.name, "the method's")
        help_text = _help(kind.part, default, listed=f"bfl list {kind.name}")
        command = click.option(f"--{kind.name}", metavar="NAME", help=help_text)(command)
    return command


def experiment_flags(command: Any, *, required: bool = True) -> Any:
    """Give a command the argument METHOD and every flag that decides an experiment.

    `resolved` turns their values, as keyword arguments, into an experiment. METHOD may be left out
    unless it is `required`.
    """
    add = click.option(
        "-o",
        "options",
        multiple=True,
        metavar="PART.OPTION=VALUE",
        help="any option of a part, a dataset, a partition or a label-noise, or "
        "calibrator.NAME.OPTION=VALUE (repeatable; bfl show PART NAME lists the options)",
    )
    flags = _settings_flags(DataSettings)(_settings_flags(RunSettings)(_part_flags(add(command))))
    return click.argument("method", required=required)(flags)


def resolved(registry: Registry, method: str, options: tuple[str, ...], **given: Any) -> Experiment:
    """Resolve a method or an experiment file with flags; print a note on what has no effect."""
    file: Values = {}
    if method.endswith(".toml"):
        file = read(Path(method))
        method = method_of(file, Path(method))
    experiment = resolve_flags(registry, method, file, given, options)
    weighting = experiment.weighting.name if given.get("weighting") else None
    if note := ignored(experiment.aggregator, weighting):
        click.echo(note, err=True)
    return experiment


@click.command("run", context_settings={"max_content_width": 100})
@experiment_flags
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="run directory [default: a new folder under runs/]",
)
@QUIET
@JSON
def run(
    out: Path | None,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run METHOD (see bfl list method), or a file experiment.toml.

    Flags override the file, which overrides the method's own choices (bfl show method METHOD
    prints them), which override the defaults below.
    """
    registry = load_registry()
    experiment = resolved(registry, **given)
    from bflcore.experiments.directory import RunDirectory, default_directory
    from bflcore.experiments.prepare import prepare

    prepared = prepare(experiment)
    path = out or default_directory(experiment)
    directory = RunDirectory.create(path, prepared, registry)
    execute_and_report(prepared, directory, quiet=quiet, as_json=as_json)


commands = (run,)
