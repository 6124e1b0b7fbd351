"""Commands that plugins add to the command line."""

import click
import pytest

import bflcore.cli.run  # noqa: F401 - before the registry is replaced, which it binds
from bflcore import Command, component
from bflcore.cli import bfl as group
from bflcore.registry.loading import Plugin, Registry


@component
class Greet(Command):
    """Greet somebody."""

    name = "greet"

    def build(self):
        @click.command("greet")
        @click.argument("whom")
        def greet(whom):
            click.echo(f"hello {whom}")

        return greet


@component
class Impostor(Greet):
    """Take the name of a command of the core."""

    name = "run"


@pytest.fixture
def installed(monkeypatch):
    found = Registry()
    found.add(Plugin("bfl-greet", "1", "tests"), [Greet, Impostor])
    monkeypatch.setattr("bflcore.registry.loading.load_registry", lambda: found)


def test_a_plugins_command_runs_and_is_listed(installed, bfl):
    assert bfl("greet", "world") == (0, "hello world\n", "")
    assert "Greet somebody." in bfl("--help")[1]


def test_the_cores_commands_keep_their_names(installed):
    context = click.Context(group)
    assert group.list_commands(context).count("run") == 1
    assert "METHOD" in group.get_command(context, "run").get_help(context)
