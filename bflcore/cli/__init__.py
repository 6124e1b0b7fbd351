"""The command line ``bfl``.

Commands load when called, so that ``bfl --help`` and the listings never wait for torch.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any, TextIO

import click

from bflcore.errors import BflError, RunWarning, described

if TYPE_CHECKING:
    from bflcore.registry.command import Command

__all__ = ["bfl", "main"]

DEBUG = "--debug"

# Command -> (module, one line of help); the module exports `commands`.
COMMANDS = {
    "list-plugins": ("bflcore.cli.listing", "Show installed distributions and whether they work."),
    "list": ("bflcore.cli.listing", "List components of every kind, or of one."),
    "show": ("bflcore.cli.listing", "Explain one component, or the settings of runs."),
    "matrix": ("bflcore.cli.matrix", "Show which parts fit together."),
    "run": ("bflcore.cli.run", "Run a method, or an experiment file."),
    "resume": ("bflcore.cli.resume", "Continue a run exactly where it stopped."),
    "sweep": ("bflcore.cli.sweep", "Run methods with a grid of settings and several seeds."),
    "reproduce": ("bflcore.cli.reproduce", "Run a paper's table and print ours beside it."),
    "report": ("bflcore.cli.results", "Write report.html for one or several runs."),
    "compare": ("bflcore.cli.results", "Compare runs, and the cells of sweeps."),
    "coefficients": ("bflcore.cli.results", "Print a linear predictor's coefficients."),
    "predict": ("bflcore.cli.models", "Predict samples with a model of a finished run."),
    "export": ("bflcore.cli.models", "Write a model of a finished run to one file."),
    "adapt": ("bflcore.cli.models", "Make a model for a client that a run never saw."),
    "new-plugin": ("bflcore.cli.plugins", "Write the files of a new plugin."),
    "check-plugin": ("bflcore.cli.plugins", "Check an installed plugin's components."),
}


class Commands(click.Group):
    """The commands above and those of plugins, imported one at a time.

    Plugins are loaded only for a name that is not the core's, and for the list of all commands.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the core's names in the order of the table, then the plugins' names."""
        return [*COMMANDS, *_of_plugins()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the command's module."""
        if name not in COMMANDS:
            found = _of_plugins().get(name)
            return found().build() if found else None
        commands = importlib.import_module(COMMANDS[name][0]).commands
        command: click.Command = next(command for command in commands if command.name == name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest name."""
        known = args[0] in COMMANDS or args[0].startswith("-")
        if not known and args[0] not in self.list_commands(ctx):
            from bflcore.errors import unknown

            raise unknown("command", args[0], self.list_commands(ctx), "bfl --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        lines = {name: text for name, (_, text) in COMMANDS.items()}
        with formatter.section("Commands"):
            formatter.write_dl([*(lines | _lines_of_plugins()).items()])


def _of_plugins() -> dict[str, type[Command]]:
    """Return the plugins' commands by name; the core's own names are taken."""
    from bflcore.registry.loading import load_registry

    found = load_registry().commands.items()
    return {name: command for name, command in found if name not in COMMANDS}


def _lines_of_plugins() -> dict[str, str]:
    return {
        name: (command.__doc__ or "").partition("\n")[0] for name, command in _of_plugins().items()
    }


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="bflcore")
@click.option("--debug", is_flag=True, help="Show tracebacks (may also follow the command).")
def bfl(debug: bool) -> None:
    """Bayesian federated learning: run, mix and compare methods."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on standard error and exit status 2.

    A defect is one line, too, and exit status 1. With ``--debug``, anywhere, the tracebacks of
    errors and of clients that fail come before it.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug = DEBUG in given
    if debug:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("bflcore").setLevel(logging.DEBUG)
    try:
        words = [word for word in given if word != DEBUG]
        with warnings.catch_warnings():
            warnings.simplefilter("always", RunWarning)
            warnings.showwarning = _show
            status: Any = bfl.main(args=words, prog_name="bfl", standalone_mode=False)
    except BflError as error:
        _refuse(str(error), debug)
    except click.UsageError as error:
        hint = f"; {error.ctx.command_path} --help lists what is allowed" if error.ctx else ""
        _refuse(error.format_message().rstrip(".") + hint, debug)
    except click.ClickException as error:
        _refuse(error.format_message(), debug)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except MemoryError:
        _refuse("there is not enough memory; use less data or a smaller model", debug)
    except OSError as error:
        if not error.filename:
            _refuse(_defect(error), debug, status=1)
        _refuse(f"{str(error.filename)[:200]}: {error.strerror}; give another path", debug)
    except Exception as error:  # noqa: BLE001 - a defect, of ours or of a plugin: still one line
        _refuse(_defect(error), debug, status=1)
    sys.exit(status if isinstance(status, int) else 0)


def _defect(error: Exception) -> str:
    """Say what was not expected, and whose defect it is."""
    said = f"unexpected {described(error, None)}"
    from bflcore.registry.loading import load_registry

    if plugin := load_registry().blamed(error):
        return (
            f"plugin {plugin.name} {plugin.version} failed: {said}; report it to its authors (add "
            "--debug for the traceback)"
        )
    return f"{said}; this is a defect: add --debug for the traceback, and report it"


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print what concerns a run in one line, and other warnings as Python does."""
    if issubclass(category, RunWarning):
        click.echo("warning: " + " ".join(str(message).split()), err=True)
    else:
        (file or sys.stderr).write(
            warnings.formatwarning(message, category, filename, lineno, line)
        )


def _refuse(message: str, debug: bool, status: int = 2) -> None:
    if debug:
        traceback.print_exc()
    click.echo("error: " + " ".join(message.split()), err=True)
    sys.exit(status)
