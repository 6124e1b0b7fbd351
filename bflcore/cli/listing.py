"""``bfl list-plugins``, ``bfl list`` and ``bfl show``: what is installed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click

from bflcore.cli.columns import columns
from bflcore.errors import unknown
from bflcore.experiments.resolve import CALIBRATOR
from bflcore.options import Component, Option, changed, options_of, type_name
from bflcore.options.kinds import KINDS
from bflcore.options.settings import SETTINGS
from bflcore.options.text import value_text
from bflcore.registry.loading import CORE, Registry, load_registry

if TYPE_CHECKING:
    from bflcore.methods import Method
    from bflcore.registry.loading import Plugin

__all__ = ["commands"]

JSON = click.option("--json", "as_json", is_flag=True, help="JSON output")


@click.command("list-plugins")
@JSON
def list_plugins(as_json: bool) -> None:
    """Show installed distributions, whether they work, and what they contribute."""
    found = load_registry().plugins
    if as_json:
        click.echo(json.dumps([attrs.asdict(plugin) for plugin in found], indent=2))
        return
    states = [
        (p.name, p.version, "ok" if p.state == "ok" else f"broken: {p.reason}") for p in found
    ]
    for plugin, line in zip(found, columns(states, indent=""), strict=True):
        click.echo(line)
        kinds = [(kind, ", ".join(names)) for kind, names in _by_kind(plugin).items()]
        for contributed in columns(kinds, indent="    "):
            click.echo(contributed)


@click.command("list")
@click.argument("kind", required=False)
@JSON
def list_components(kind: str | None, as_json: bool) -> None:
    """List the components of KIND, or of every kind; bfl list settings lists the settings."""
    registry, kind = load_registry(), kind and _singular(kind)
    kinds = [kind] if kind else [*(kind.name for kind in KINDS), "settings"]
    found = {
        kind: [_entry(registry, component) for component in _components(registry, kind).values()]
        for kind in kinds
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for called, entries in found.items():
        if entries or kind:
            click.echo(click.style(called, bold=True))
        for line in columns((_with_aliases(entry), entry["summary"]) for entry in entries):
            click.echo(line)


@click.command("show")
@click.argument("kind")
@click.argument("name")
@JSON
def show(kind: str, name: str, as_json: bool) -> None:
    """Explain the component NAME of KIND: what it does, its options, its reference.

    bfl show settings run and bfl show settings data explain the settings.
    """
    registry, kind = load_registry(), _singular(kind)
    component = _components(registry, kind)[name]
    facts = {
        **_entry(registry, component),
        "kind": kind,
        "reference": component.reference,
        "description": inspect.cleandoc(component.__doc__ or ""),
        "options": [_option(option) for option in options_of(component)],
        **(_recipe(registry.methods[name]) if kind == "method" else {}),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"{kind} {_with_aliases(facts)}  ({facts['distribution']})\n")
    click.echo(f"{facts['description']}\n")
    if component.reference:
        click.echo(f"Reference: {component.reference}\n")
    if kind == "method":
        click.echo("\n".join(columns(_recipe_rows(registry.methods[name]))))
    for option in options_of(component):
        allowed = f" [{option.allowed}]" if option.allowed else ""
        prefix = "--" if kind == "settings" else f"{kind}."
        if kind == CALIBRATOR:  # a run may have several
            prefix += f"{component.name}."
        called = option.name.replace("_", "-") if kind == "settings" else option.name
        default = value_text(option.default) or "none"
        click.echo(f"  {prefix}{called} = {default}  ({type_name(option.type)}){allowed}")
        click.echo(f"      {option.help}")


def _singular(kind: str) -> str:
    """Return the name of a kind that is given in the plural, any other text as it is."""
    plurals = {each.plural.replace("_", "-"): each.name for each in KINDS}
    return plurals.get(kind.replace("_", "-"), kind)


class _Settings(dict[str, type[Component]]):
    """The settings by name, which are shown like components."""

    def __missing__(self, name: str) -> type[Component]:
        raise unknown("settings", name, self, "bfl list settings")


def _components(registry: Registry, kind: str) -> Mapping[str, type[Component]]:
    return _Settings(SETTINGS) if kind == "settings" else registry.of(kind)


def _entry(registry: Registry, component: type[Component]) -> dict[str, Any]:
    of_core = component.kind == "settings"
    return {
        "name": component.name,
        "aliases": list(component.aliases),
        "distribution": CORE if of_core else registry.owner(component.kind, component.name),
        "summary": component.summary(),
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "name": option.name,
        "type": type_name(option.type),
        "default": option.default,
        "allowed": option.allowed,
        "help": option.help,
    }


def _by_kind(plugin: Plugin) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for kind, name in plugin.components:
        grouped.setdefault(kind, []).append(name)
    return grouped


def _with_aliases(entry: Mapping[str, Any]) -> str:
    aliases = ", ".join(entry["aliases"])
    return f"{entry['name']} ({aliases})" if aliases else str(entry["name"])


def _recipe(method: type[Method]) -> dict[str, Any]:
    """Return what a method chooses: parts with the options that it sets, and settings."""
    parts = {
        kind: {"name": part.name, "options": changed(part)} for kind, part in method.parts().items()
    }
    return {"parts": parts, "share": method.share, "settings": dict(method.settings)}


def _recipe_rows(method: type[Method]) -> list[tuple[str, str]]:
    rows = []
    for kind, part in method.parts().items():
        options = [f"{name} = {value_text(value)}" for name, value in changed(part).items()]
        rows.append((kind, part.name))
        rows += [("", f"  {option}") for option in options]
    settings = {"share": method.share, **method.settings}
    return rows + [(name, value_text(value)) for name, value in settings.items()]


commands = (list_plugins, list_components, show)
