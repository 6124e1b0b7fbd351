"""``bfl check-plugin`` and ``bfl new-plugin``: for people who write plugins."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import attrs
import click

from bflcore.cli.columns import columns
from bflcore.cli.template import COMMANDS, write_plugin
from bflcore.errors import OptionError, unknown
from bflcore.registry.loading import Plugin, Registry, load_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from bflcore.testing import Check, Outcome

__all__ = ["commands"]

STATES = ("ok", "expected failure", "failed")


@click.command("check-plugin")
@click.argument("name")
@click.option("--all", "everything", is_flag=True, help="output of every check, not only failures")
@click.option("--json", "as_json", is_flag=True, help="JSON output")
def check_plugin(name: str, everything: bool, as_json: bool) -> int:
    """Check every component of the installed plugin NAME; exit with 1 if a check fails.

    NAME is a distribution, as bfl list-plugins shows it; bfl- may be left out.
    """
    registry = load_registry()
    plugin = _plugin(registry, name)
    if plugin.state != "ok":
        click.echo(f"{plugin.name} {plugin.version} is broken: {plugin.reason}", err=not as_json)
        return 1
    from bflcore.testing import checks

    found = [check for kind, name in plugin.components for check in checks(registry.of(kind)[name])]
    rows = [
        {"kind": check.part.kind, "name": check.part.name, "check": check.name}
        | attrs.asdict(outcome)
        for check, outcome in _outcomes(found, quiet=as_json)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo("\n".join(_table(plugin, rows, everything)))
        click.echo("".join(_unchecked(registry, plugin)), nl=False)
    return 1 if any(row["state"] == "failed" for row in rows) else 0


@click.command("new-plugin")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(list(COMMANDS)),
    default="inference",
    show_default=True,
    help="what it contributes (an inference comes with a method)",
)
@click.option("--out", type=click.Path(path_type=Path), help="folder to create [default: bfl-NAME]")
def new_plugin(name: str, kind: str, out: Path | None) -> None:
    """Write a distribution bfl-NAME with a component: complete, installable, tested."""
    name = name.removeprefix("bfl-")
    registry = load_registry()
    for taken in ("method", "inference") if kind == "inference" else (kind,):
        if name in registry.of(taken):
            owner = registry.owner(taken, name)
            raise OptionError(
                f"NAME: {name!r} is taken: {taken} {name} of {owner}; choose another name"
            )
    folder = out or Path(f"bfl-{name}")
    written = write_plugin(name, folder, kind)
    click.echo("\n".join(f"  {path}" for path in written))
    click.echo(f"\nNext: pip install -e '{folder}[test]' && bfl check-plugin {name}")
    click.echo(f"      {Template(COMMANDS[kind]).substitute(name=name)} && pytest {folder}")


def _plugin(registry: Registry, name: str) -> Plugin:
    found = {one.name: one for one in registry.plugins}
    for called in (name, f"bfl-{name}"):
        if called in found:
            return found[called]
    raise unknown("plugin", name, found, "bfl list-plugins")


def _outcomes(found: list[Check], quiet: bool) -> Iterator[tuple[Check, Outcome]]:
    with _progress(len(found), quiet) as advance:
        for check in found:
            yield check, check.outcome()
            advance()


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=total)
        yield lambda: bar.advance(task)


def _table(plugin: Plugin, rows: list[dict[str, Any]], everything: bool) -> Iterator[str]:
    yield f"{plugin.name} {plugin.version}"
    own = [
        [row for row in rows if (row["kind"], row["name"]) == component]
        for component in plugin.components
    ]
    lines = columns(
        (kind, name, _counts(found))
        for (kind, name), found in zip(plugin.components, own, strict=True)
    )
    for line, found in zip(lines, own, strict=True):
        yield line
        for row in found:
            if everything or row["state"] != "ok":
                reason = f": {row['reason']}" if row["reason"] else ""
                yield f"      {row['state']}  {row['check']}{reason}"
    failed = sum(row["state"] == "failed" for row in rows)
    yield f"{len(rows)} checks, {failed or 'none'} failed"


def _unchecked(registry: Registry, plugin: Plugin) -> Iterator[str]:
    """Say which laws an aggregator does not claim: they were not checked."""
    for kind, name in plugin.components:
        part = registry.of(kind)[name]
        missing = [tag for tag in part.known_tags if tag not in part.tags]
        if kind == "aggregator" and missing:
            yield f"not checked, because {name} does not claim them: {', '.join(missing)}\n"


def _counts(rows: list[dict[str, Any]]) -> str:
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


commands = (check_plugin, new_plugin)
