"""``bfl run``: run a method or an experiment file, with live progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bflcore.cli.execution import execute_and_report
from bflcore.errors import OptionError, nearest, unknown
from bflcore.experiments.compatibility import ignored
from bflcore.experiments.resolve import PARTS, Text, read, resolve
from bflcore.options import Component, options_of
from bflcore.problem.likelihoods import LIKELIHOODS
from bflcore.registry.loading import load_registry
from bflcore.settings import DataSettings, RunSettings

if TYPE_CHECKING:
    from bflcore.experiments.resolve import Experiment, Values
    from bflcore.registry.loading import Registry

__all__ = [
    "JSON",
    "QUIET",
    "commands",
    "experiment_flags",
    "missing_method",
    "resolved",
]

# Flags that are short for an option of a part.
SHORT = {
    "lr": ("inference", "lr", "Learning rate of the local inference."),
    "local-epochs": ("inference", "local_epochs", "Passes over a client's data per round."),
    "batch-size": ("inference", "batch_size", "Samples per minibatch."),
    "workers": ("engine", "workers", "Worker processes; 0: one a core."),
    "client-timeout": ("engine", "client_timeout", "Seconds a client may take; 0: any."),
}
# Flags that choose a part.
CHOOSE = ("inference", "aggregator", "weighting", "hyper", "model", "likelihood", "engine")


QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print summary.json at the end.")


def _settings_flags(cls: type[Component]) -> Callable[[Any], Any]:
    """Turn every setting into a flag; values stay text and are read by the setting's own type."""

    def decorate(command: Any) -> Any:
        for declared in reversed(options_of(cls)):
            flag = f"--{declared.name.replace('_', '-')}"
            help_text = declared.help + (f" ({declared.allowed})" if declared.allowed else "")
            if declared.type is bool:
                command = click.option(flag, is_flag=True, default=None, help=help_text)(command)
            else:
                command = click.option(flag, metavar="VALUE", help=help_text)(command)
        return command

    return decorate


def _part_flags(command: Any) -> Any:
    for flag, (_, _, text) in reversed(SHORT.items()):
        command = click.option(f"--{flag}", metavar="VALUE", help=text)(command)
    for kind in reversed(CHOOSE):
        text = (
            f"Names: {', '.join(LIKELIHOODS)}." if kind == "likelihood" else f"See bfl list {kind}."
        )
        command = click.option(f"--{kind}", metavar="NAME", help=text)(command)
    return command


def experiment_flags(command: Any) -> Any:
    """Give a command the argument METHOD and every flag that decides an experiment.

    `resolved` makes the experiment of what they are given as keyword arguments.
    """
    add = click.option(
        "-o", "options", multiple=True, metavar="PART.OPTION=VALUE", help="Set any option."
    )
    flags = _settings_flags(DataSettings)(_settings_flags(RunSettings)(_part_flags(add(command))))
    return click.argument("method")(flags)


def resolved(
    registry: Registry, method: str, options: tuple[str, ...], **given: str | bool | None
) -> Experiment:
    """Resolve a method, or an experiment file, with flags; say what will be without effect."""
    file: Values = {}
    if method.endswith(".toml"):
        file = read(Path(method))
        method = file.get("method") or missing_method(method)
    flags = _flags(given, options)
    experiment = resolve(registry, method, file, flags)
    weighting = experiment.weighting.name if "weighting" in flags else None
    if note := ignored(experiment.aggregator, weighting):
        click.echo(note, err=True)
    return experiment


@click.command("run", context_settings={"max_content_width": 100})
@experiment_flags
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; default under runs/.")
@QUIET
@JSON
def run(
    out: Path | None,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run METHOD (see bfl list method), or a file experiment.toml.

    Flags override the file, which overrides the method's defaults.
    """
    registry = load_registry()
    experiment = resolved(registry, **given)
    from bflcore.experiments.directory import RunDirectory, default_directory
    from bflcore.experiments.prepare import prepare

    prepared = prepare(experiment)
    path = out or default_directory(experiment)
    directory = RunDirectory.create(path, prepared, registry)
    execute_and_report(prepared, directory, quiet=quiet, as_json=as_json)


def missing_method(file: str) -> str:
    """Refuse a file that names no method."""
    raise OptionError(f'{file}: the key method is missing; add method = "bpfed" or another name')


def _flags(given: dict[str, str | bool | None], options: tuple[str, ...]) -> Values:
    values: Values = {}
    for name, value in given.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        if flag in SHORT:
            part, key, _ = SHORT[flag]
            values.setdefault(part, {})[key] = Text(value)
        elif name in CHOOSE:
            values.setdefault(name, {})["name"] = value
        else:
            table = values.setdefault("data", {}) if _is_data(name) else values
            table[name] = Text(value) if isinstance(value, str) else value
    for text in options:
        part, key, value = _assignment(text)
        values.setdefault(part, {})[key] = Text(value)
    return values


def _is_data(name: str) -> bool:
    return any(declared.name == name for declared in options_of(DataSettings))


def _assignment(text: str) -> tuple[str, str, str]:
    target, equals, value = text.partition("=")
    part, dot, key = target.partition(".")
    allowed = (*PARTS, "dataset", "partition")
    if not (equals and dot and key):
        near = nearest(target, allowed)
        raise OptionError(
            f"-o: {text!r} is not allowed{near}; allowed: PART.OPTION=VALUE, "
            "for example -o inference.lr=0.01"
        )
    if part not in allowed:
        raise unknown("part in -o", part, allowed)
    return part, key, value


commands = (run,)
