"""An experiment: everything that decides a run, resolved from a method, a file and flags.

Precedence: component defaults < method < TOML < flags. A resolved experiment is stored as
``experiment.toml``; running that file repeats the run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from bflcore.errors import OptionError, unknown
from bflcore.experiments import compatibility
from bflcore.options import (
    Component,
    as_dict,
    build,
    canonical,
    label,
    options_of,
)
from bflcore.options.kinds import CONFIGURABLE, KINDS, PARTS, Kind, kind_called
from bflcore.options.settings import DataSettings, RunSettings
from bflcore.options.text import parse_spec, spec_text

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
    from bflcore.problem.likelihoods import Likelihood
    from bflcore.registry.loading import Registry
    from bflcore.registry.loggers import Logger
    from bflcore.weighting import Weighting

__all__ = ["Experiment", "chosen_class", "read", "resolve"]

Values = dict[str, Any]
S = TypeVar("S", bound=Component)

OF_DATA = {kind.name: kind for kind in KINDS if kind.setting}  # chosen by a setting of the data


@attrs.frozen
class Experiment:
    """Everything resolved: the method's name, the settings and the parts."""

    method: str
    run: RunSettings
    data: DataSettings
    dataset: DataSource | None  # None: a user's own file
    partition: Partitioner
    inference: LocalInference
    aggregator: Aggregator
    weighting: Weighting
    hyper: HyperUpdate
    model: Model
    engine: Engine
    loggers: tuple[Logger, ...]
    likelihood: Likelihood | None  # None: the default for the task
    label_noise: LabelNoise | None = None

    def components(self) -> Iterator[Component]:
        """Yield every component that decides the results, likelihood and data included."""
        for kind in CONFIGURABLE:
            if (found := getattr(self, kind.replace("-", "_"))) is not None:
                yield found

    def as_toml(self) -> Values:
        """Return plain nested values; `resolve` on them gives this experiment back."""
        data = _options(self.data) | {"partition": spec_text(self.partition)}
        if self.label_noise is not None:
            data["label_noise"] = spec_text(self.label_noise)
        parts = {kind: getattr(self, kind) for kind in PARTS}
        tables = {kind: as_dict(part) for kind, part in parts.items() if part is not None}
        if self.dataset is not None:
            tables["dataset"] = _options(self.dataset)
        return {"method": self.method, **_options(self.run), "data": data, **tables}


def read(path: Path) -> Values:
    """Read an experiment file. Raises `OptionError` if it is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"cannot read {path}: {error.strerror}; give a method or a file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not valid TOML: {error}") from None


def resolve(registry: Registry, method: str, file: Values, flags: Values) -> Experiment:
    """Resolve an experiment.

    `file` and `flags` hold plain values in the same form: settings of the run at the top, those of
    the data in the table ``data``, and a table of options per component (``inference``, ...,
    ``dataset``, ``partition``, ``label-noise``); the ``name`` in a part's table chooses it. Raises
    `OptionError` or `IncompatibleError`.
    """
    recipe = registry.methods[method]
    _refuse_unknown_keys(file)
    run = _run_settings(recipe, file, flags)
    data = _data_settings(recipe, file, flags)
    if "cohort" not in {**file, **flags} and run.cohort > data.clients - data.novel_clients:
        run = run.replace(cohort=0)  # the method's cohort is for more clients: take all
    _check_counts(run, data)
    parts: Values = {kind: _part(registry, recipe, kind, file, flags) for kind in PARTS}
    fitted = (type(parts[kind]) for kind in compatibility.FITTED)
    compatibility.check(registry, type(parts["inference"]), *fitted)
    of_data: Values = {
        kind.attribute: _of_data(registry, kind, data, file, flags) for kind in OF_DATA.values()
    }
    return Experiment(
        method=recipe.name,
        run=run,
        data=data,
        loggers=tuple(_logger(registry, name) for name in run.log),
        **parts,
        **of_data,
    )


def chosen_class(
    registry: Registry, method: str, kind: str, file: Values, flags: Values
) -> type[Component] | None:
    """Return the class of the component that an experiment uses for a kind, if any.

    Arguments are those of `resolve`; options are not looked at.
    """
    recipe = registry.methods[method]
    if kind in OF_DATA:
        data = _data_settings(recipe, file, flags)
        return _class_of_data(registry, OF_DATA[kind], getattr(data, OF_DATA[kind].setting))
    name = flags.get(kind, {}).get("name") or _table(file, kind).get("name")
    return _class_of_part(registry, recipe, kind, name)


def _options(component: Component) -> Values:
    return {key: value for key, value in as_dict(component).items() if key != "name"}


def _run_settings(recipe: type[Method], file: Values, flags: Values) -> RunSettings:
    tables = {"method", "data", *CONFIGURABLE}
    given = {key: value for key, value in file.items() if key not in tables}
    return _settings(RunSettings, {"share": recipe.share, **recipe.settings}, given, flags)


def _data_settings(recipe: type[Method], file: Values, flags: Values) -> DataSettings:
    table = _table(file, "data")
    return _settings(DataSettings, recipe.settings, table, flags.get("data", {}))


def _settings(cls: type[S], recipe: Mapping[str, object], file: Values, flags: Values) -> S:
    names = {declared.name for declared in options_of(cls)}
    recommended = {key: value for key, value in recipe.items() if key in names}
    given = {key: value for key, value in flags.items() if key in names}
    return build(cls, recommended | file | given, "--")


def _part(
    registry: Registry, recipe: type[Method], kind: str, file: Values, flags: Values
) -> Component | None:
    """Return a part: the method's options hold for its own choice, the file's for the file's."""
    table, given = _table(file, kind), dict(flags.get(kind, {}))
    of_file = table.pop("name", None)
    name = given.pop("name", None) or of_file
    cls = _class_of_part(registry, recipe, kind, name)
    if cls is None:
        for key in table | given:
            raise OptionError(
                f"{label(kind, key)}: no {kind} is chosen; add --{kind} NAME "
                f"(bfl list {kind} shows the names)"
            )
        return None
    preset: Component | None = getattr(recipe, kind)
    values = _options(preset) if type(preset) is cls and preset is not None else {}
    if of_file is None or _class_of_part(registry, recipe, kind, of_file) is cls:
        values |= canonical(cls, table)
    values |= canonical(cls, given)
    if kind == "model" and ":" in cls.name:
        return _own_model(cls.name, values)
    return build(cls, values, kind)


def _class_of_part(
    registry: Registry, recipe: type[Method], kind: str, name: str | None
) -> type[Component] | None:
    """Return the class called `name`, or the method's choice, or the kind's default, if any."""
    preset: Component | None = getattr(recipe, kind)
    if name is None and preset is not None:
        return type(preset)
    called = name or kind_called(kind).default
    if kind == "model" and ":" in called:
        from bflcore.models.user import load_factory

        return type(load_factory(called))
    return registry.of(kind)[called] if called else None


def _own_model(name: str, options: Values) -> Model:
    """Return the user's model ``module:factory``, which has no options."""
    from bflcore.models.user import load_factory

    for key in options:
        raise OptionError(
            f"{label('model', key)}: {name} is your own model, which has no options; "
            "leave it out, or let the factory decide"
        )
    return load_factory(name)


def _of_data(
    registry: Registry, kind: Kind, data: DataSettings, file: Values, flags: Values
) -> Component | None:
    """Return the data set, partition or label noise that a setting chooses."""
    text = getattr(data, kind.setting)
    cls = _class_of_data(registry, kind, text)
    table, given = _table(file, kind.name), flags.get(kind.name, {})
    if kind.setting in flags.get("data", {}):  # the file's options are for the file's choice
        of_file = _class_of_data(registry, kind, _table(file, "data").get(kind.setting))
        table = table if of_file is cls and ":" not in text else {}
    if cls is None:
        for key in table | given:
            raise OptionError(
                f"{label(kind.name, key)}: {text or 'none'} has no options; choose another with "
                f"--{kind.setting.replace('_', '-')} NAME (bfl list {kind.name} shows the names)"
            )
        return None
    flag = f"--{kind.setting.replace('_', '-')}"
    values = _options(parse_spec(cls, text, flag)) if ":" in text else {}
    return build(cls, values | canonical(cls, table) | canonical(cls, given), kind.name)


def _class_of_data(registry: Registry, kind: Kind, text: str | None) -> type[Component] | None:
    """Return the class that ``name:values`` names; None for a user's own file, and for none."""
    if text is None or text.endswith(".npz"):
        return None
    found: type[Component] = registry.of(kind.name)[text.partition(":")[0]]
    return found


def _logger(registry: Registry, name: str) -> Logger:
    logger = registry.loggers[name]()
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
    allowed = {"method", "data", *CONFIGURABLE, *(o.name for o in options_of(RunSettings))}
    for key in file:
        if key not in allowed:
            raise unknown("key of the experiment file:", key, allowed)


def _table(file: Values, key: str) -> Values:
    table = file.get(key, {})
    if not isinstance(table, Mapping):
        raise OptionError(f"{key}: {table!r} is not allowed in the experiment file; write [{key}]")
    return dict(table)
