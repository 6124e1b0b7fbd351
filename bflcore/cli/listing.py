"""``bfl list-plugins``, ``bfl list`` and ``bfl show``: what is installed."""

from __future__ import annotations

import inspect
import json
from typing import Any

import attrs
import click

from bflcore.options import options_of, type_name
from bflcore.registry.loading import Distribution, load_registry

__all__ = ["commands"]

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("list-plugins")
@JSON
def list_plugins(as_json: bool) -> None:
    """Show installed distributions, whether they work, and what they contribute."""
    found = load_registry().distributions
    if as_json:
        click.echo(json.dumps([attrs.asdict(one) for one in found], indent=2))
        return
    name = max(len(one.name) for one in found)
    version = max(len(one.version) for one in found)
    for one in found:
        state = "ok" if one.state == "ok" else f"broken: {one.reason}"
        click.echo(f"{one.name:<{name}}  {one.version:<{version}}  {state}")
        for kind, names in _by_kind(one).items():
            click.echo(f"    {kind:<11}{', '.join(names)}")


@click.command("list")
@click.argument("kind", required=False)
@JSON
def list_parts(kind: str | None, as_json: bool) -> None:
    """List the components of KIND, or of every kind."""
    registry = load_registry()
    kinds = [kind] if kind else list(registry.kinds)
    rows = {
        one: [
            {
                "name": part.name,
                "aliases": list(part.aliases),
                "distribution": registry.owner(one, part.name),
                "summary": part.summary(),
            }
            for part in registry.all(one)
        ]
        for one in kinds
    }
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for one, parts in rows.items():
        if parts or kind:
            click.echo(click.style(one, bold=True))
        names = [_with_aliases(part) for part in parts]
        width = max(map(len, names), default=0)
        for name, part in zip(names, parts, strict=True):
            click.echo(f"  {name:<{width}}  {part['summary']}")


@click.command("show")
@click.argument("kind")
@click.argument("name")
@JSON
def show(kind: str, name: str, as_json: bool) -> None:
    """Explain the component NAME of KIND: what it does, its options, its reference."""
    registry = load_registry()
    part = registry.get(kind, name)
    options: list[dict[str, Any]] = [
        {
            "name": one.name,
            "type": type_name(one.type),
            "default": one.default,
            "allowed": one.allowed,
            "help": one.help,
        }
        for one in options_of(part)
    ]
    facts = {
        "kind": kind,
        "name": part.name,
        "aliases": list(part.aliases),
        "distribution": registry.owner(kind, part.name),
        "reference": part.reference,
        "description": inspect.cleandoc(part.__doc__ or ""),
        "options": options,
        **_recipe(part),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"{kind} {_with_aliases(facts)}  ({facts['distribution']})\n")
    click.echo(f"{facts['description']}\n")
    if part.reference:
        click.echo(f"Reference: {part.reference}\n")
    for key, value in _recipe(part).items():
        click.echo(f"  {key:<11}{value}")
    for one in options:
        allowed = f" [{one['allowed']}]" if one["allowed"] else ""
        click.echo(f"  {kind}.{one['name']} = {one['default']}  ({one['type']}){allowed}")
        click.echo(f"      {one['help']}")


def _by_kind(distribution: Distribution) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for kind, name in distribution.components:
        grouped.setdefault(kind, []).append(name)
    return grouped


def _with_aliases(part: dict[str, Any]) -> str:
    aliases = ", ".join(part["aliases"])
    return f"{part['name']} ({aliases})" if aliases else str(part["name"])


def _recipe(part: Any) -> dict[str, Any]:
    """Return what a method chooses, and nothing for other kinds."""
    if part.kind != "method":
        return {}
    parts = ("inference", "aggregator", "weighting", "hyper", "share")
    return {kind: getattr(part, kind) for kind in parts} | {"defaults": dict(part.defaults)}


commands = (list_plugins, list_parts, show)
