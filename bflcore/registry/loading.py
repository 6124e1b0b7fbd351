"""The registry: every installed component by kind and name, and why a plugin is broken.

Entry points load one by one, sorted by distribution. A plugin registers everything or nothing: any
error marks it as broken, with the reason and its distribution, and everything else works. Set
``BFL_STRICT_PLUGINS=1`` to raise instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from bflcore.errors import BflError, PluginError, nearest, unknown
from bflcore.options import Component
from bflcore.options.kinds import KINDS, kind_called
from bflcore.registry import builtin, hookspecs
from bflcore.registry.hookspecs import GROUP
from bflcore.registry.importing import guarded
from bflcore.registry.validation import check_component

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
    from bflcore.posteriors import Posterior
    from bflcore.problem.calibration.base import Calibrator
    from bflcore.problem.likelihoods import Likelihood
    from bflcore.registry.command import Command
    from bflcore.registry.loggers import Logger
    from bflcore.weighting import Weighting

__all__ = ["Plugin", "Registry", "View", "load_registry", "read_plugins"]

CORE = "bflcore"
HOOKS = tuple(kind.hook for kind in KINDS)
MOST = 1000  # components of one kind that a plugin may contribute

C = TypeVar("C", bound=Component)
D = TypeVar("D")


@attrs.frozen
class Plugin:
    """One plugin: its distribution, whether it works, why not, and what it contributes."""

    name: str
    version: str
    module: str
    state: str = "ok"
    reason: str = ""
    components: tuple[tuple[str, str], ...] = ()


class View(Mapping[str, "type[C]"]):
    """The components of one kind, by name or alias; iterates over the names, sorted."""

    def __init__(self, kind: str, found: Mapping[str, type[C]], registry: Registry) -> None:
        self._kind = kind
        self._found = found  # by name and by alias
        self._registry = registry

    def __getitem__(self, name: str) -> type[C]:
        """Return the component of this name or alias.

        Raises `OptionError` with the nearest name if there is none.
        """
        if name not in self._found:
            broken = any(plugin.state != "ok" for plugin in self._registry.plugins)
            hint = " (a plugin is broken: bfl list-plugins)" if broken else ""
            raise unknown(self._kind, name, self._found, f"bfl list {self._kind}{hint}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({component.name for component in self._found.values()}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def get(self, name: str, default: D | None = None) -> type[C] | D | None:  # type: ignore[override]
        """Return the component of this name or alias, or `default`."""
        return self._found.get(name, default)


class Registry:
    """Components by kind, then by name or alias: ``registry.aggregators["average"]``."""

    methods: View[Method]
    posteriors: View[Posterior]
    inferences: View[LocalInference]
    aggregators: View[Aggregator]
    weightings: View[Weighting]
    hyper_updates: View[HyperUpdate]
    models: View[Model]
    likelihoods: View[Likelihood]
    engines: View[Engine]
    datasets: View[DataSource]
    partitions: View[Partitioner]
    label_noises: View[LabelNoise]
    calibrators: View[Calibrator]
    loggers: View[Logger]
    commands: View[Command]

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []  # working or not: the core first, then by name
        self._owners: dict[type[Component], str] = {}
        self._claimed: dict[tuple[str, str], str] = {}  # also by plugins that were withdrawn
        self._found: dict[str, dict[str, type[Component]]] = {kind.name: {} for kind in KINDS}
        for kind in KINDS:
            setattr(self, kind.plural, View(kind.name, self._found[kind.name], self))

    def of(self, kind: str) -> View[Any]:
        """Return the components of a kind that is known by name only.

        Raises `OptionError` with the nearest kind if there is none of that name.
        """
        view: View[Any] = getattr(self, kind_called(kind).plural)
        return view

    def owner(self, kind: str, name: str) -> str:
        """Return the distribution that contributes a component."""
        return self._owners[self.of(kind)[name]]

    def add(self, plugin: Plugin, components: Iterable[type[Component]]) -> None:
        """Register a working plugin's components: all of them, or none and `PluginError`.

        Of two plugins that claim the same name, neither is trusted: nobody could say which one a
        run meant. The core's names cannot be claimed.
        """
        new: dict[str, dict[str, type[Component]]] = {kind.name: {} for kind in KINDS}
        names = []
        for component in components:
            kind = component.kind
            names.append((kind, component.name))
            for name in (component.name, *component.aliases):
                if name in new[kind]:
                    raise PluginError(f"{kind} {name!r} is registered twice by this plugin")
                if other := self._claimed.get((kind, name)):
                    self._withdraw(other, plugin.name, f"{kind} {name!r}")
                    raise PluginError(_clash(f"{kind} {name!r}", other))
                new[kind][name] = component
        for kind, found in new.items():
            self._found[kind].update(found)
            self._owners |= dict.fromkeys(found.values(), plugin.name)
            self._claimed |= {(kind, name): plugin.name for name in found}
        self.plugins.append(attrs.evolve(plugin, components=tuple(names)))

    def blamed(self, error: BaseException) -> Plugin | None:
        """Return the plugin in whose code an error was raised, or that called what raised it."""
        packages = {
            plugin.module.partition(":")[0].partition(".")[0]: plugin
            for plugin in self.plugins
            if plugin.name != CORE
        }
        trace, found = error.__traceback__, None
        while trace is not None:
            name = str(trace.tb_frame.f_globals.get("__name__", ""))
            found = packages.get(name.partition(".")[0], found)
            trace = trace.tb_next
        return found

    def _withdraw(self, name: str, other: str, what: str) -> None:
        """Take out the components of a plugin whose name another one claims; the core's stay."""
        if name == self.plugins[0].name:
            return
        for found in self._found.values():
            for key in [key for key, cls in found.items() if self._owners[cls] == name]:
                del found[key]
        reason = _clash(what, other)
        self.plugins = [
            attrs.evolve(plugin, state="broken", reason=reason, components=())
            if plugin.name == name and plugin.state == "ok"
            else plugin
            for plugin in self.plugins
        ]


def _clash(what: str, other: str) -> str:
    return f"{what} is also registered by {other}; uninstall one of the two, or rename it"


@cache
def load_registry() -> Registry:
    """Load the core's components and every installed plugin's."""
    return read_plugins(builtin)


def read_plugins(core: ModuleType) -> Registry:
    """Load the components of `core` and of every entry point of the group ``bfl``, uncached."""
    registry = Registry()
    # Not from the metadata, where a stranger's distribution may have the core's name.
    version = str(sys.modules[CORE].__version__)
    registry.add(Plugin(CORE, version, core.__name__), _components_of(core))
    found: dict[str, list[tuple[Plugin, metadata.Distribution]]] = {}
    for installed in metadata.distributions():
        if plugins := _plugins_of(installed):  # of a name found twice, the first on the path counts
            name = canonicalize_name(plugins[0].name)
            found.setdefault(name, [(plugin, installed) for plugin in plugins])
    for _, pairs in sorted(found.items()):
        for plugin, installed in pairs:
            _load(registry, plugin, installed, version)
    return registry


def _plugins_of(installed: metadata.Distribution) -> list[Plugin]:
    """Return a distribution's plugins, still unloaded; one alone if its entries are malformed."""
    text = installed.read_text("entry_points.txt") or ""
    if f"[{GROUP}]" not in text:  # most of what is installed: leave its metadata unread
        return []
    name = next(iter(_metadata(installed, "Name")), "")
    version = next(iter(_metadata(installed, "Version")), "?")
    try:
        entries = sorted(installed.entry_points.select(group=GROUP), key=lambda entry: entry.name)
    except Exception as error:
        reason = f"entry_points.txt is malformed ({_reason(error)})"
        return [Plugin(name or "(no name)", version, "?", "broken", reason)]
    return [Plugin(name or entry.name, version, entry.value) for entry in entries]


def _metadata(installed: metadata.Distribution, field: str) -> list[str]:
    """Return a field's values; none if the metadata are missing, for which some finders raise."""
    try:
        return installed.metadata.get_all(field) or []
    except (OSError, ValueError, AttributeError):
        return []


def _load(
    registry: Registry, plugin: Plugin, installed: metadata.Distribution, core_version: str
) -> None:
    try:
        if plugin.state != "ok":
            raise PluginError(plugin.reason)  # noqa: TRY301 - reported like any other failure
        if canonicalize_name(plugin.name) == CORE:
            raise PluginError(  # noqa: TRY301 - reported like any other failure
                f"its distribution is called {plugin.name}, as the core is; rename it"
            )
        _check_requirement(_declared_requirement(installed), core_version)
        with guarded(plugin.name, plugin.module):
            module = metadata.EntryPoint("plugin", plugin.module, GROUP).load()
            _check_requirement(getattr(module, "BFLCORE_REQUIRES", ""), core_version)
            components = _components_of(module)
        registry.add(plugin, components)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a stranger's module may do anything, even exit
        reason = _reason(error)
        if os.environ.get("BFL_STRICT_PLUGINS") == "1":
            raise PluginError(f"plugin {plugin.name} {plugin.version}: {reason}") from error
        registry.plugins.append(attrs.evolve(plugin, state="broken", reason=reason))


def _reason(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # the stranger's exception cannot even be printed
        text = ""
    if text and isinstance(error, BflError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _declared_requirement(installed: metadata.Distribution) -> str:
    """Return the versions of the core that a distribution's metadata ask for, all of them."""
    specifiers = []
    for line in _metadata(installed, "Requires-Dist"):
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if canonicalize_name(requirement.name) == CORE and applies:
                specifiers.append(str(requirement.specifier))
    return ",".join(filter(None, specifiers))


def _check_requirement(specifier: str, version: str) -> None:
    try:
        fits = SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidSpecifier, TypeError):
        raise PluginError(f"BFLCORE_REQUIRES {specifier!r} is not a version specifier") from None
    if not fits:
        raise PluginError(f"needs bflcore{specifier}, but {version} is installed")


def _components_of(module: object) -> list[type[Component]]:
    """Call every hook of one module, in a pluggy manager of its own.

    Nothing is left half registered: a plugin that fails takes its manager with it.
    """
    _check_hooks(module)
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    components: list[type[Component]] = []
    for kind in KINDS:
        caller = getattr(manager.hook, kind.hook)
        results = caller()
        if caller.get_hookimpls() and not results:  # pluggy drops None
            raise PluginError(f"{kind.hook} returned nothing; yield the classes")
        for number, component in enumerate(islice(chain(*results), MOST + 1)):
            if number == MOST:
                raise PluginError(f"{kind.hook} yielded more than {MOST} classes")
            check_component(component, kind)
            components.append(component)
    return components


def _check_hooks(module: object) -> None:
    """Raise `PluginError` for a function that is named or marked like a hook, but is not one."""
    for name, value in vars(module).items():
        # A module is not callable; asking a lazy one for an attribute would import it.
        marked = callable(value) and hasattr(value, f"{GROUP}_impl")
        if not callable(value) or not (marked or name.startswith("bfl_")):
            continue
        if name not in HOOKS:
            near = nearest(name, HOOKS)
            raise PluginError(f"unknown hook {name}{near}; hooks: {', '.join(HOOKS)}")
        if not marked:
            raise PluginError(f"{name} is not marked; write @hookimpl above it")
