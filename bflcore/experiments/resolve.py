"""An experiment: everything that decides a run, resolved from a method, a file and flags.

Precedence: component defaults < method < TOML < flags. A resolved experiment is stored as
``experiment.toml``; running that file repeats the run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from bflcore.errors import OptionError, unknown
from bflcore.experiments import compatibility
from bflcore.options import (
    Component,
    as_dict,
    build,
    options_of,
    parse_spec,
    parse_text,
    spec_text,
)
from bflcore.problem.likelihoods import LIKELIHOODS, Likelihood
from bflcore.settings import DataSettings, RunSettings

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.data.base import DataSource
    from bflcore.data.label_noise import LabelNoise
    from bflcore.data.partition import Partitioner
    from bflcore.engines.base import Engine
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.methods import Method
    from bflcore.models.base import Model
    from bflcore.registry.loading import Registry
    from bflcore.registry.loggers import Logger
    from bflcore.weighting import Weighting

__all__ = ["Experiment", "Text", "read", "resolve"]

PARTS = ("inference", "aggregator", "weighting", "hyper", "model", "engine", "likelihood")

DEFAULTS = {"model": "mlp", "engine": "local"}  # parts that a method does not choose

Values = dict[str, Any]


class Text(str):
    """An option's value as typed on the command line."""

    __slots__ = ()


@attrs.frozen
class Experiment:
    """Everything resolved: the method's name, the settings and the parts."""

    method: str
    run: RunSettings
    data: DataSettings
    source: DataSource | None  # None: a user's own file
    partition: Partitioner
    inference: LocalInference
    aggregator: Aggregator
    weighting: Weighting
    hyper: HyperUpdate
    model: Model
    engine: Engine
    loggers: tuple[Logger, ...]
    likelihood: Likelihood | None  # None: whatever suits the data
    label_noise: LabelNoise | None = None

    def as_toml(self) -> Values:
        """Return plain nested values; `resolve` on them gives this experiment back."""
        data = as_dict(self.data) | {"partition": spec_text(self.partition)}
        if self.label_noise is not None:
            data["label_noise"] = spec_text(self.label_noise)
        if self.source is not None:
            data["options"] = {k: v for k, v in as_dict(self.source).items() if k != "name"}
        parts = {kind: getattr(self, kind) for kind in PARTS}
        return {
            "method": self.method,
            **{k: v for k, v in as_dict(self.run).items() if k != "name"},
            "data": {k: v for k, v in data.items() if k != "name"},
            **{kind: as_dict(part) for kind, part in parts.items() if part is not None},
        }


def read(path: Path) -> Values:
    """Read an experiment file. Raises `OptionError` when it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"cannot read {path}: {error.strerror}; give a method or a file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is no valid TOML: {error}") from None


def resolve(registry: Registry, method: str, file: Values, flags: Values) -> Experiment:
    """Resolve an experiment.

    `file` and `flags` hold plain values: settings at the top, ``data`` and the parts as tables
    (a part's ``name`` chooses it). Flags may hold `Text`, read by the option's type; the tables
    ``dataset`` and ``partition`` of the flags set options of those. Raises `OptionError` or
    `IncompatibleError`.
    """
    recipe = cast("type[Method]", registry.get("method", method))
    _refuse_unknown_defaults(recipe)
    _refuse_unknown_keys(file)
    run = build(RunSettings, _settings(RunSettings, recipe, file, flags), "--")
    table = _table(file, "data")
    data = build(DataSettings, _settings(DataSettings, recipe, table, flags.get("data", {})), "--")
    if "cohort" not in {**file, **flags} and run.cohort > data.clients - data.novel_clients:
        run = attrs.evolve(
            cast("Any", run), cohort=0
        )  # the method's default is for more clients: take all
    _check_counts(run, data)
    parts = {
        kind: _part(registry, kind, recipe, _table(file, kind), flags.get(kind, {}))
        for kind in PARTS
    }
    compatibility.check(
        registry,
        type(cast("LocalInference", parts["inference"])),
        *(cast(Any, type(parts[kind])) for kind in compatibility.FITTED),
    )
    return Experiment(
        method=recipe.name,
        run=run,
        data=data,
        source=_source(registry, data.data, table.get("options", {}), flags.get("dataset", {})),
        loggers=tuple(_logger(registry, name) for name in run.log),
        partition=_partition(registry, data.partition, flags.get("partition", {})),
        label_noise=_label_noise(data.label_noise),
        **cast(Any, parts),
    )


def _logger(registry: Registry, name: str) -> Logger:
    logger = cast("Logger", registry.get("logger", name)())
    logger.check()
    return logger


def _check_counts(run: RunSettings, data: DataSettings) -> None:
    train = data.clients - data.novel_clients
    if train < 1:
        raise OptionError(
            f"--novel-clients: {data.novel_clients} of {data.clients} clients leave none to train; "
            f"allowed: at most {data.clients - 1}"
        )
    for flag, given in (("cohort", run.cohort), ("min-clients", run.min_clients)):
        if given > train:
            raise OptionError(
                f"--{flag}: {given} is more than the clients that train; allowed: at most {train}"
            )


def _refuse_unknown_keys(file: Values) -> None:
    allowed = {"method", "data", *PARTS, *(o.name for o in options_of(RunSettings))}
    for key in file:
        if key not in allowed:
            raise unknown("key of the experiment file:", key, allowed)


def _refuse_unknown_defaults(recipe: type[Method]) -> None:
    """Refuse a default that no setting has; a part's own options are checked when it is built."""
    settings = {o.name for cls in (RunSettings, DataSettings) for o in options_of(cls)}
    allowed = settings | set(DEFAULTS)
    for key in recipe.defaults:
        if key.partition(".")[0] in PARTS and "." in key:
            continue
        if key not in allowed:
            raise unknown(f"default of method {recipe.name}:", key, allowed)


def _table(file: Values, key: str) -> Values:
    table = file.get(key, {})
    if not isinstance(table, Mapping):
        raise OptionError(f"{key}: {table!r} is not allowed in the experiment file; write [{key}]")
    return dict(table)


def _settings(cls: type[Component], recipe: type[Method], file: Values, flags: Values) -> Values:
    names = {declared.name for declared in options_of(cls)}
    tables = {"method", "data", "options", *PARTS}
    values: Values = {k: v for k, v in recipe.defaults.items() if k in names}
    if "share" in names:
        values["share"] = recipe.share
    values |= {k: v for k, v in file.items() if k in names or k not in tables}
    return values | _typed(cls, {k: v for k, v in flags.items() if k in names}, "--")


def _part(
    registry: Registry, kind: str, recipe: type[Method], file: Values, flags: Values
) -> Component | None:
    preset = recipe.defaults.get(kind) or DEFAULTS.get(kind) or getattr(recipe, kind, None)
    preset = None if preset is None else str(preset)
    name = flags.get("name") or file.get("name") or preset
    if name is None:
        return None
    found = _find(registry, kind, str(name))
    if not isinstance(found, type):
        return found
    values: Values = {}
    if preset and _find(registry, kind, preset) is found:
        prefix = f"{kind}."
        values = {
            key.removeprefix(prefix): value
            for key, value in recipe.defaults.items()
            if key.startswith(prefix)
        }
    if not file.get("name") or _find(registry, kind, str(file["name"])) is found:
        values |= {k: v for k, v in file.items() if k != "name"}
    return build(found, values | _typed(found, flags, kind), kind)


def _typed(cls: type[Component], flags: Values, where: str) -> Values:
    return {
        key: parse_text(cls, key, value, where) if isinstance(value, Text) else value
        for key, value in flags.items()
        if key != "name"
    }


def _find(registry: Registry, kind: str, name: str) -> type[Component] | Component:
    """Return the class of a part, or the ready model of a user's ``module:factory``."""
    if kind == "likelihood":
        if name not in LIKELIHOODS:
            raise unknown("likelihood", name, LIKELIHOODS)
        return LIKELIHOODS[name]
    if kind == "model" and ":" in name:
        from bflcore.models.user import load_factory

        return load_factory(name)
    return registry.get(kind, name)


def _source(registry: Registry, name: str, file: Values, flags: Values) -> DataSource | None:
    if name.endswith(".npz"):
        return None
    cls = cast("type[DataSource]", registry.get("dataset", name))
    return build(cls, file | _typed(cls, flags, "data"), "data")


def _partition(registry: Registry, text: str, flags: Values) -> Partitioner:
    cls = cast("type[Partitioner]", registry.get("partition", text.partition(":")[0]))
    spec = {k: v for k, v in as_dict(parse_spec(cls, text, "--partition")).items() if k != "name"}
    return build(cls, spec | _typed(cls, flags, "partition"), "partition")


def _label_noise(text: str | None) -> LabelNoise | None:
    if text is None:
        return None
    from bflcore.data.label_noise import LABEL_NOISES

    name = text.partition(":")[0]
    if name not in LABEL_NOISES:
        raise unknown("value of --label-noise:", name, LABEL_NOISES)
    return parse_spec(LABEL_NOISES[name], text, "--label-noise")
