"""An experiment: everything that decides a run, resolved from a method, a file and flags.

Precedence: component defaults < method < TOML < flags. A resolved experiment is stored as
``experiment.toml``; running that file repeats the run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from bflcore.data.user import FORMS, TABLE_FLAGS, OwnData, is_own
from bflcore.errors import OptionError, unknown
from bflcore.experiments import compatibility
from bflcore.models.user import load_factory
from bflcore.options import Component, as_dict, build, canonical, label, options_of
from bflcore.options.kinds import CONFIGURABLE, FITTED, PARTS, Kind, kind_called
from bflcore.options.settings import DataSettings, RunSettings
from bflcore.options.text import parse_spec, spec_text
from bflcore.problem.calibration import CALIBRATORS

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
    from bflcore.problem.calibration.base import Calibrator
    from bflcore.problem.likelihoods import Likelihood
    from bflcore.registry.loading import Registry
    from bflcore.registry.loggers import Logger
    from bflcore.weighting import Weighting

__all__ = [
    "CALIBRATOR",
    "Experiment",
    "build_calibrators",
    "chosen_class",
    "method_of",
    "read",
    "resolve",
]

CALIBRATOR = "calibrator"  # the table with a table of options per calibrator

Values = dict[str, Any]
S = TypeVar("S", bound=Component)


@attrs.frozen
class Experiment:
    """Everything resolved: the method's name, the settings and the parts."""

    method: str
    run: RunSettings
    data: DataSettings
    dataset: DataSource
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
    calibrators: tuple[Calibrator, ...] = ()
    ood: DataSource | None = None  # None: found by the data, a file, or off
    # Settings that a file or a flag gives, as opposed to defaults that the data may change.
    asked: frozenset[str] = attrs.field(default=frozenset(), eq=False, repr=False)

    def with_clients(self, count: int) -> Experiment:
        """Return the experiment with this number of clients.

        Raises `OptionError` if other settings ask for more.
        """
        data, run = self.data.replace(clients=count), self.run
        if "cohort" not in self.asked and run.cohort > count - data.novel_clients:
            run = run.replace(cohort=0)  # the method's cohort is for more clients: take all
        _check_counts(run, data)
        return attrs.evolve(self, data=data, run=run)

    def components(self) -> Iterator[Component]:
        """Yield every component that decides the results, likelihood and data included."""
        for kind in CONFIGURABLE:
            if (found := getattr(self, kind.replace("-", "_"))) is not None:
                yield found
        yield from self.calibrators

    def as_toml(self) -> Values:
        """Return plain nested values; `resolve` on them gives this experiment back."""
        data = _options(self.data) | {"partition": spec_text(self.partition)}
        if self.label_noise is not None:
            data["label_noise"] = spec_text(self.label_noise)
        parts = {kind: getattr(self, kind) for kind in PARTS}
        tables = {kind: as_dict(part) for kind, part in parts.items() if part is not None}
        tables["dataset"] = _options(self.dataset)
        if self.calibrators:
            tables[CALIBRATOR] = {one.name: _options(one) for one in self.calibrators}
        return {"method": self.method, **_options(self.run), "data": data, **tables}


def read(path: Path) -> Values:
    """Read an experiment file. Raises `OptionError` if it is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"cannot read {path}: {error.strerror}; give a method or a file"
        ) from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise OptionError(f"{path} is not valid TOML: {str(error)[:200]}") from None


def method_of(file: Values, path: Path) -> str:
    """Return the method that the content of an experiment file names.

    Raises `OptionError` if it names none.
    """
    if not file.get("method"):
        raise OptionError(
            f'{path}: the key method is missing; add method = "bpfed" or another name'
        )
    return str(file["method"])


def resolve(registry: Registry, method: str, file: Values, flags: Values) -> Experiment:
    """Resolve an experiment.

    `file` and `flags` hold plain values in the same form: settings of the run at the top, those of
    the data in the table ``data``, and a table of options per component (``inference``, ...,
    ``dataset``, ``partition``, ``label-noise``); the ``name`` in a part's table chooses it; the
    table ``calibrator`` has a table of options per calibrator. Raises `OptionError` or
    `IncompatibleError`.
    """
    recipe = registry.methods[method]
    top = {declared.name for declared in options_of(RunSettings)}
    allowed = {"method", "data", CALIBRATOR, *CONFIGURABLE, *top}
    for key in file:
        if key not in allowed:
            raise unknown("key of the experiment file:", key, allowed)
    given = {key: value for key, value in {**file, **flags}.items() if key in top}
    run = _settings(RunSettings, recipe, given)
    of_data = _table(file, "data") | flags.get("data", {})
    data = _settings(DataSettings, recipe, of_data)
    components: Values = {
        name.replace("-", "_"): _component(registry, recipe, kind_called(name), file, flags)
        for name in CONFIGURABLE
    }
    inference, fitted = components["inference"], {kind: components[kind] for kind in FITTED}
    compatibility.check(registry, type(inference), *map(type, fitted.values()))
    inference.check_parts(fitted)
    loggers = tuple(registry.loggers[name]() for name in run.log)
    for logger in loggers:
        logger.check()
    given_tables = _table(file, CALIBRATOR)
    tables = {name: _table(given_tables, name, f"{CALIBRATOR}.") for name in given_tables}
    for name, table in flags.get(CALIBRATOR, {}).items():
        tables[name] = tables.get(name, {}) | table
    calibrators = _calibrators(registry, run, data, tables)
    asked = frozenset({*given, *of_data})
    found = Experiment(
        method=recipe.name,
        run=run.replace(calibrate=tuple(one.name for one in calibrators)),
        data=data,
        loggers=loggers,
        calibrators=calibrators,
        ood=_ood(registry, data.ood),
        asked=asked,
        **components,
    )
    _check_data(found)
    # The number of owners is known once the data are loaded.
    known = "clients" in asked or not (
        found.partition.by_owner or isinstance(found.dataset, OwnData)
    )
    return found.with_clients(data.clients) if known else found


def _calibrators(
    registry: Registry, run: RunSettings, data: DataSettings, tables: Mapping[str, Values]
) -> tuple[Calibrator, ...]:
    """Return the calibrators that a run names, or those by default; with `tables` of options."""
    if (run.calibrate or tables) and not data.calibration_fraction:
        named = f"--calibrate {','.join(run.calibrate)}"
        raise OptionError(
            f"{f'{CALIBRATOR}.{min(tables)}' if tables else named}: no samples are held out for "
            "calibration; add --calibration-fraction 0.2"
        )
    names = run.calibrate or tuple(one.name for one in CALIBRATORS)
    chosen = build_calibrators(registry, names if data.calibration_fraction else (), tables)
    for name, table in tables.items():
        if table and registry.calibrators[name] not in map(type, chosen):
            raise OptionError(
                f"{CALIBRATOR}.{name}.{min(table)}: {name} is not among --calibrate "
                f"{','.join(one.name for one in chosen)}"
            )
    return chosen


def build_calibrators(
    registry: Registry, names: Sequence[str], tables: Mapping[str, Values]
) -> tuple[Calibrator, ...]:
    """Return the calibrators of these names, each with the options in its table, if any."""
    if len(set(names)) < len(names):
        raise OptionError(f"--calibrate: {','.join(names)} names one of them twice")
    return tuple(
        build(registry.calibrators[name], tables.get(name, {}), f"{CALIBRATOR}.{name}")
        for name in names
    )


def _ood(registry: Registry, name: str) -> DataSource | None:
    """Return the data set that --ood names; None where it names none."""
    if name in {"auto", "none"} or name.endswith(".npz"):
        return None
    return registry.datasets[name]()


def chosen_class(
    registry: Registry, method: str, kind: str, file: Values, flags: Values
) -> type[Component] | None:
    """Return the class of the component that an experiment uses for a kind, if any.

    Arguments are those of `resolve`; options are not looked at.
    """
    recipe, called = registry.methods[method], kind_called(kind)
    return _class_of(registry, recipe, called, _last_name(_choices(recipe, called, file, flags)))


def _options(component: Component) -> Values:
    return {key: value for key, value in as_dict(component).items() if key != "name"}


def _settings(cls: type[S], recipe: type[Method], given: Values) -> S:
    names = {declared.name for declared in options_of(cls)}
    recommended = {"share": recipe.share, **recipe.settings}
    return build(cls, {k: v for k, v in recommended.items() if k in names} | given, "--")


def _component(
    registry: Registry, recipe: type[Method], kind: Kind, file: Values, flags: Values
) -> Component | None:
    """Return the component chosen for a kind, with the options given for it.

    Options are ignored where a later source chooses another component.
    """
    choices = _choices(recipe, kind, file, flags)
    text = _last_name(choices)
    cls = _class_of(registry, recipe, kind, text)
    flag = f"--{(kind.setting or kind.name).replace('_', '-')}"
    values: Values = {}
    for name, options in choices:
        if name and _class_of(registry, recipe, kind, name) is not cls:
            continue
        if name and kind.setting and cls and ":" in name:
            values |= _options(parse_spec(cls, name, flag))
        values |= canonical(cls, options) if cls else options
    own_model = kind.name == "model" and ":" in text
    if cls and not own_model:
        return build(cls, values, kind.name)
    for key in values:
        said = f"{text} has no options" if text else f"no {kind.name} is chosen"
        raise OptionError(
            f"{label(kind.name, key)}: {said}; choose one with {flag} NAME "
            f"(bfl list {kind.name} shows the names)"
        )
    return load_factory(text) if own_model else None


def _choices(
    recipe: type[Method], kind: Kind, file: Values, flags: Values
) -> list[tuple[str, Values]]:
    """Return the name and options that the method, the file and the flags give for a kind.

    The name is empty where they give none.
    """
    table, given = _table(file, kind.name), dict(flags.get(kind.name, {}))
    if kind.setting:
        preset = {kind.setting: getattr(DataSettings(), kind.setting), **recipe.settings}
        layers: list[Values] = [preset, _table(file, "data"), flags.get("data", {})]
        names = [str(layer.get(kind.setting) or "") for layer in layers]
        return list(zip(names, ({}, table, given), strict=True))
    part = getattr(recipe, kind.name)
    tables = (as_dict(part) if part else {"name": kind.default}, table, given)
    return [(str(table.pop("name", "")), table) for table in tables]


def _last_name(choices: list[tuple[str, Values]]) -> str:
    return next((name for name, _ in reversed(choices) if name), "")


def _class_of(
    registry: Registry, recipe: type[Method], kind: Kind, text: str
) -> type[Component] | None:
    """Return the class that a name, ``name:values`` or a path to a user's own data names."""
    if not text:
        return None
    if kind.name == "dataset" and text not in registry.of("dataset"):
        if is_own(text):
            return OwnData
        try:
            registry.of("dataset")[text]
        except OptionError as error:
            raise OptionError(f"{error}; or your own data: {FORMS}") from None
    preset: Component | None = recipe.parts().get(kind.name)
    if preset is not None and text == preset.name:
        return type(preset)
    if kind.name == "model" and ":" in text:
        return type(load_factory(text))
    found: type[Component] = registry.of(kind.name)[
        text.partition(":")[0] if kind.setting else text
    ]
    return found


def _check_data(experiment: Experiment) -> None:
    """Refuse settings of a user's own data with a data set that has none of its columns."""
    data = experiment.data
    for flag in () if isinstance(experiment.dataset, OwnData) else (*TABLE_FLAGS, "task"):
        if getattr(data, flag):
            raise OptionError(
                f"--{flag} is for your own data and has no effect on {data.data}; leave it out"
            )


def _check_counts(run: RunSettings, data: DataSettings) -> None:
    train = data.clients - data.novel_clients
    if train < 1:
        raise OptionError(
            f"--novel-clients: {data.novel_clients} of {data.clients} clients leave none to train; "
            f"allowed: at most {data.clients - 1}"
        )
    for flag, given in (("cohort", run.cohort), ("min-clients", run.min_clients or 0)):
        if given > train:
            raise OptionError(
                f"--{flag}: {given} is more than the clients that train; allowed: at most {train}"
            )


def _table(file: Values, key: str, within: str = "") -> Values:
    table = file.get(key, {})
    if not isinstance(table, Mapping):
        shown = repr(table)[:100]
        raise OptionError(
            f"{within}{key}: {shown} is not allowed in the experiment file; write [{within}{key}]"
        )
    return dict(table)
