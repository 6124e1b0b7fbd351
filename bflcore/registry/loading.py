"""The registry: every installed part by kind and name, and what is wrong with broken plugins.

Entry points load one by one, sorted by distribution. A plugin is all or nothing: whatever goes
wrong with it marks it broken, with the reason and its distribution, and everything else works.
Set ``BFL_STRICT_PLUGINS=1`` to raise instead.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import attrs
import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from bflcore.errors import PluginError, nearest, unknown
from bflcore.options import Component
from bflcore.registry import builtin, hookspecs
from bflcore.registry.hookspecs import GROUP, HOOKS

__all__ = ["Distribution", "Registry", "load_registry"]

CORE = "bflcore"
Part = type[Component]
Installed = importlib.metadata.Distribution


@attrs.frozen
class Distribution:
    """One plugin: its distribution, whether it works, why not, and the parts it contributes."""

    name: str
    version: str
    module: str
    state: str = "ok"
    reason: str = ""
    components: tuple[tuple[str, str], ...] = ()


class Registry:
    """Parts by kind and by name or alias."""

    def __init__(self) -> None:
        self._distributions: list[Distribution] = []
        self._parts: dict[str, dict[str, Part]] = {kind: {} for kind in HOOKS}
        self._names: dict[str, dict[str, tuple[Part, str]]] = {kind: {} for kind in HOOKS}

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """Every plugin found, working or not: the core first, then by name."""
        return tuple(self._distributions)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of component."""
        return tuple(HOOKS)

    def all(self, kind: str) -> tuple[Part, ...]:
        """Return every part of a kind, sorted by name."""
        self._check_kind(kind)
        return tuple(part for _, part in sorted(self._parts[kind].items()))

    def get(self, kind: str, name: str) -> Part:
        """Return the part called `name` (or so abbreviated).

        Raises `OptionError` with the nearest name when there is none.
        """
        self._check_kind(kind)
        if name in self._names[kind]:
            return self._names[kind][name][0]
        broken = any(d.state != "ok" for d in self._distributions)
        step = f"bfl list {kind}" + (" (a plugin is broken: bfl list-plugins)" if broken else "")
        raise unknown(kind, name, self._names[kind], step)

    def owner(self, kind: str, name: str) -> str:
        """Return the distribution that contributes a part."""
        self.get(kind, name)
        return self._names[kind][name][1]

    def add(self, distribution: Distribution, parts: Iterable[tuple[str, Part]]) -> None:
        """Register a working plugin's parts: all of them, or none and `PluginError`."""
        found = list(parts)
        taken: set[tuple[str, str]] = set()
        for kind, part in found:
            for name in (part.name, *part.aliases):
                owner = self._names[kind].get(name)
                if owner or (kind, name) in taken:
                    by = f"by {owner[1]}" if owner else "twice by this plugin"
                    raise PluginError(f"{kind} {name!r} is already registered {by}")
                taken.add((kind, name))
        for kind, part in found:
            self._parts[kind][part.name] = part
            for name in (part.name, *part.aliases):
                self._names[kind][name] = (part, distribution.name)
        names = tuple((kind, part.name) for kind, part in found)
        self._distributions.append(attrs.evolve(distribution, components=names))

    def add_broken(self, distribution: Distribution, reason: str) -> None:
        """Note a plugin that does not work."""
        self._distributions.append(attrs.evolve(distribution, state="broken", reason=reason))

    def _check_kind(self, kind: str) -> None:
        if kind not in HOOKS:
            raise unknown("kind", kind, HOOKS, "bfl list")


@cache
def load_registry() -> Registry:
    """Load the core's parts and every installed plugin's."""
    return read_plugins(builtin)


def read_plugins(core: ModuleType) -> Registry:
    """Load the parts of `core` and of every entry point of the group ``bfl``, uncached."""
    registry = Registry()
    version = importlib.metadata.version(CORE)
    registry.add(Distribution(CORE, version, core.__name__), _parts_of(core))
    for distribution, installed in _installed():
        _load(registry, distribution, installed, version)
    return registry


def _installed() -> list[tuple[Distribution, Installed]]:
    """Return every plugin with its metadata, sorted; a name's first place on the path wins."""
    found: dict[str, list[tuple[Distribution, Installed]]] = {}
    for installed in importlib.metadata.distributions():
        plugins = _plugins_of(installed)
        if plugins:
            name = canonicalize_name(plugins[0].name)
            found.setdefault(name, [(plugin, installed) for plugin in plugins])
    return [pair for _, pairs in sorted(found.items()) for pair in pairs]


def _plugins_of(installed: Installed) -> list[Distribution]:
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
        return [Distribution(name or "(no name)", version, "?", "broken", reason)]
    return [Distribution(name or entry.name, version, entry.value) for entry in entries]


def _metadata(installed: Installed, field: str) -> list[str]:
    """Return a field's values; none where the metadata are missing, which some finders raise."""
    try:
        return installed.metadata.get_all(field) or []
    except (OSError, ValueError, AttributeError):
        return []


def _load(
    registry: Registry, distribution: Distribution, installed: Installed, core_version: str
) -> None:
    name, version = distribution.name, distribution.version
    try:
        _check_requirement(_declared_requirement(installed), core_version)
        module = _module_of(distribution)
        _check_requirement(getattr(module, "BFLCORE_REQUIRES", ""), core_version)
        registry.add(distribution, _parts_of(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a stranger's module may do anything, even exit
        if os.environ.get("BFL_STRICT_PLUGINS") == "1":
            raise PluginError(f"plugin {name} {version}: {_reason(error)}") from error
        registry.add_broken(distribution, _reason(error))


def _module_of(distribution: Distribution) -> object:
    if distribution.state != "ok":
        raise PluginError(distribution.reason)
    return importlib.metadata.EntryPoint("plugin", distribution.module, GROUP).load()


def _reason(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # the stranger's exception cannot even be printed
        text = ""
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _declared_requirement(installed: Installed) -> str:
    """Return the versions of the core that a distribution's metadata ask for, all of them."""
    specifiers = []
    for line in _metadata(installed, "Requires-Dist"):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) == CORE and applies and requirement.specifier:
            specifiers.append(str(requirement.specifier))
    return ",".join(specifiers)


def _check_requirement(specifier: str, version: str) -> None:
    try:
        fits = SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidSpecifier, TypeError):
        raise PluginError(f"BFLCORE_REQUIRES {specifier!r} is no version specifier") from None
    if not fits:
        raise PluginError(f"needs bflcore{specifier}, but {version} is installed")


def _parts_of(module: object) -> list[tuple[str, Part]]:
    """Call every hook of one module, in a pluggy manager of its own.

    Nothing is left half registered: a plugin that fails takes its manager with it.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    _refuse_misspelt(module)
    manager.register(module)
    manager.check_pending()
    parts: list[tuple[str, Part]] = []
    for kind, hook in HOOKS.items():
        caller = getattr(manager.hook, hook)
        results = caller()
        if caller.get_hookimpls() and not results:  # pluggy drops None
            raise PluginError(f"{hook} returned nothing; yield the classes")
        for yielded in results:
            parts += [(kind, _checked(part, kind, hook)) for part in yielded]
    return parts


def _refuse_misspelt(module: object) -> None:
    for name in _hooklike(module):
        if name not in HOOKS.values():
            near = nearest(name, HOOKS.values())
            raise PluginError(f"{name} is no hook{near}; hooks: {', '.join(HOOKS.values())}")
        if not hasattr(getattr(module, name), f"{GROUP}_impl"):
            raise PluginError(f"{name} is not marked; write @hookimpl above it")


def _hooklike(module: object) -> Iterator[str]:
    for name, value in vars(module).items():
        marked = hasattr(value, f"{GROUP}_impl")
        if callable(value) and (marked or name.startswith("bfl_")):
            yield name


def _checked(part: Any, kind: str, hook: str) -> Part:
    if not (isinstance(part, type) and issubclass(part, Component)):
        raise PluginError(f"{hook} yielded {part!r}, which is no class of a {kind}")
    if getattr(part, "kind", None) != kind:
        raise PluginError(f"{hook} yielded {part!r}, which is no class of a {kind}")
    if not _is_name(getattr(part, "name", None)):
        raise PluginError(f"{hook} yielded {part.__name__}, which has no name")
    if not (isinstance(part.aliases, tuple) and all(map(_is_name, part.aliases))):
        raise PluginError(f"{hook} yielded {part.__name__}, whose aliases are no tuple of names")
    return part


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
