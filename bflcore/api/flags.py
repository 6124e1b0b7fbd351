"""Flags: the settings, parts and options that a command line, or a call in Python, gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bflcore.errors import OptionError, nearest, unknown
from bflcore.experiments.resolve import CALIBRATOR, chosen_class, resolve
from bflcore.options import options_of
from bflcore.options.kinds import CONFIGURABLE, PARTS
from bflcore.options.settings import DataSettings, RunSettings
from bflcore.options.text import parse_text, value_text

if TYPE_CHECKING:
    from bflcore.experiments.resolve import Experiment, Values
    from bflcore.registry.loading import Registry

__all__ = ["SHORT", "resolve_flags"]

# Flags that are short for ``-o PART.OPTION=VALUE``.
SHORT = {
    "lr": ("inference", "lr", "learning rate of the local inference"),
    "local-epochs": ("inference", "local_epochs", "passes over a client's data per round"),
    "batch-size": ("inference", "batch_size", "samples per minibatch"),
    "workers": ("engine", "workers", "worker processes (0 = chosen automatically)"),
    "client-timeout": ("engine", "client_timeout", "seconds a client may take (0 = no limit)"),
}


def resolve_flags(
    registry: Registry,
    method: str,
    file: Values,
    given: Mapping[str, Any],
    options: Iterable[str] = (),
) -> Experiment:
    """Resolve a method, or the content of an experiment `file`, with flags.

    `given` maps the flags' names (``local_epochs``) to values, None where a flag is not given;
    `options` are texts ``PART.OPTION=VALUE``. Raises `OptionError` or `IncompatibleError`.
    """
    flags = _flags(given)
    for part, key, text in [*_short(given), *map(_assignment, options)]:
        if part == CALIBRATOR:
            _set_calibrator(registry, flags, key, text)
            continue
        cls = chosen_class(registry, method, part, file, flags)
        value = text if cls is None else parse_text(cls, key, text, part)
        flags.setdefault(part, {})[key] = value
    return resolve(registry, method, file, flags)


def _set_calibrator(registry: Registry, flags: Values, key: str, text: str) -> None:
    """Set ``calibrator.NAME.OPTION``: a run may have several calibrators."""
    name, dot, option = key.partition(".")
    if not dot:
        raise OptionError(
            f"-o: {CALIBRATOR}.{key} is not allowed; allowed: {CALIBRATOR}.NAME.OPTION=VALUE, for "
            f"example -o {CALIBRATOR}.conformal.scope=client"
        )
    value = parse_text(registry.calibrators[name], option, text, f"{CALIBRATOR}.{name}")
    flags.setdefault(CALIBRATOR, {}).setdefault(name, {})[option] = value


def _flags(given: Mapping[str, Any]) -> Values:
    """Return settings and chosen names in the form of an experiment file."""
    of_run, of_data = (
        {declared.name for declared in options_of(cls)} for cls in (RunSettings, DataSettings)
    )
    short = {name.replace("-", "_") for name in SHORT}
    values: Values = {"data": {}}
    for name, value in given.items():
        if name not in {*of_run, *of_data, *short, *PARTS}:
            raise unknown("flag", name, [*of_run, *of_data, *short, *PARTS], "bfl run --help")
        if value is None or name in short:
            continue
        if name in PARTS:
            values[name] = {"name": value}
        elif name in of_data:
            values["data"][name] = value
        else:
            values[name] = value
    return values


def _short(given: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the short flags as assignments."""
    values = {flag: given.get(flag.replace("-", "_")) for flag in SHORT}
    return [(*SHORT[flag][:2], value_text(v)) for flag, v in values.items() if v is not None]


def _assignment(text: str) -> tuple[str, str, str]:
    """Split ``PART.OPTION=VALUE``. Raises `OptionError` for another form or an unknown part."""
    target, equals, value = text.partition("=")
    part, dot, key = target.partition(".")
    if not (equals and dot and key):
        raise OptionError(
            f"-o: {text!r} is not allowed{nearest(target, CONFIGURABLE)}; allowed: "
            "PART.OPTION=VALUE, for example -o inference.lr=0.01"
        )
    if part not in {*CONFIGURABLE, CALIBRATOR}:
        raise unknown("part in -o", part, [*CONFIGURABLE, CALIBRATOR])
    return part, key, value
