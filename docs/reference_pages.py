"""The reference pages of the manual, written from the code that they describe.

`pages` returns them: the command line from its own declarations, the components, settings and hooks
from the registry, and Python's public names. ``python docs/reference_pages.py FOLDER`` writes them
into a folder.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

import bflcore
from bflcore.cli import bfl
from bflcore.methods import Method
from bflcore.options import Component, Option, changed, options_of, type_name
from bflcore.options.kinds import KINDS, Kind
from bflcore.options.settings import SETTINGS
from bflcore.options.text import value_text
from bflcore.registry import hookspecs
from bflcore.registry.loading import Registry, load_registry

ROOT = Path(__file__).parents[1]
OURS = {"bflcore", *(f"bfl-{folder.name}" for folder in ROOT.glob("plugins/*"))}
# Which names stand together, by the module that defines them; the first prefix that fits counts.
GROUPS = {
    "Train, load and predict": ("bflcore.api",),
    "Many runs": ("bflcore.studies",),
    "Methods": ("bflcore.methods",),
    "Components and options": ("bflcore.options", "bflcore.registry"),
    "Posterior families": ("bflcore.posteriors",),
    "Local inference": ("bflcore.inference",),
    "Aggregators": ("bflcore.aggregation",),
    "Weightings": ("bflcore.weighting",),
    "Hyperparameter updates": ("bflcore.hyper",),
    "Messages": ("bflcore.messages", "bflcore.layout"),
    "Problems, likelihoods and calibrators": ("bflcore.problem",),
    "Data and models": ("bflcore.data", "bflcore.models"),
    "Engines": ("bflcore.engines",),
    "Errors": ("bflcore.errors",),
}
# What authors of plugins import besides, module by module (writing-plugins.md lists the names).
FOR_AUTHORS = {
    "bflcore.inference.base": ("label_counts",),
    "bflcore.inference.gradient": (
        *("Batch", "Gradient", "Optimiser", "batches", "loss_per_client", "mean_loss", "steps"),
        "trainable_mask",
    ),
    "bflcore.inference.point": ("descend", "fit_points", "objective"),
    "bflcore.inference.variational": (
        *("Objective", "fit_gaussians", "mean_and_rho", "prior_of_cohort"),
    ),
    "bflcore.inference.memory": (
        *("Memory", "OwnPosterior", "client_posterior", "join_personal", "keep_own"),
        "local_result",
    ),
    "bflcore.inference.normals": ("Noise",),
    "bflcore.aggregation": (
        *("CoordinatewiseAggregator", "add_sums", "check_posteriors", "weighted_sum"),
    ),
    "bflcore.lazy": ("lazy",),
    "bflcore.testing": ("checks", "parametrize_with_checks"),
}
# A type alias and an instance, which do not know the module that made them.
ELSEWHERE = {"Statistics": "bflcore.aggregation", "hookimpl": "bflcore.registry.hookspecs"}
SETTINGS_ARE = """Each is a flag of `bfl run`, a keyword of `bflcore.run`, and a key of
`experiment.toml` (those of the data in its table `[data]`); a method may set it."""
HOOKS_ARE = """A plugin is a module that an entry point of the group `bfl` names. It may define any
of these functions, decorated with `bflcore.hookimpl`; each yields classes."""
ABOUT = {
    "method": "A method is a named recipe of components, with a citation: `bfl run NAME`.",
    "posterior": "What is known about each parameter; an inference determines its family.",
    "inference": "How a client's data turn a prior into a posterior: `--inference NAME`.",
    "aggregator": "How the clients' posteriors become one: `--aggregator NAME`.",
    "weighting": "How much each client counts: `--weighting NAME`.",
    "hyper": "What the next round's prior is: `--hyper NAME`.",
    "model": "The network: `--model NAME`, or your own with `--model module:factory`.",
    "likelihood": "How outputs explain targets: `--likelihood NAME`.",
    "engine": "Where clients run: `--engine NAME`.",
    "dataset": "What `--data NAME` loads.",
    "partition": "Which sample belongs to which client: `--partition NAME`, or `NAME:VALUE`.",
    "label-noise": "Which training labels are made wrong: `--label-noise NAME:EPS`.",
    "calibrator": "What is corrected, or promised, after training: `--calibrate NAME,NAME`.",
    "logger": "Where metrics are written besides `metrics.jsonl`: `--log NAME,NAME`.",
    "command": "Commands that plugins add to `bfl`.",
}


def pages() -> dict[str, str]:
    """Return every generated page by its path in the manual."""
    registry = load_registry()
    return {
        "reference/command-line.md": command_line(),
        "reference/settings.md": settings(),
        "reference/hooks.md": hooks(),
        "reference/python.md": python(),
        **{f"reference/components/{k.name}.md": components(registry, k) for k in KINDS},
    }


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command of the command line with its words, groups before what they hold."""

    def walk(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield words, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                if (inner := command.get_command(context, name)) is not None:
                    yield from walk(f"{words} {name}", inner)

    yield from walk("bfl", bfl)


def command_line() -> str:
    """Describe every command: what it does, its arguments and its flags."""
    sections = [
        "# The command line",
        "Each command answers `--help`. Mistakes are one line on standard error and exit status 2.",
    ]
    for words, command in commands():
        context = click.Context(command, info_name=words)
        usage = " ".join([words, *command.collect_usage_pieces(context)])
        rows = [
            (_flags(parameter), _plain(str(getattr(parameter, "help", ""))))
            for parameter in command.get_params(context)
            if isinstance(parameter, click.Option)
        ]
        text = inspect.cleandoc(command.help or "")
        sections += [f"## {words}", f"```text\n{usage}\n```", text, _table(("flag", ""), rows)]
    return _joined(sections)


def settings() -> str:
    """Describe the settings of a run and of its data, which are flags of ``bfl run``."""
    sections = [
        "# Settings",
        SETTINGS_ARE,
    ]
    for name, group in SETTINGS.items():
        rows = [
            _option_row(option, f"--{option.name.replace('_', '-')}")
            for option in options_of(group)
        ]
        sections += [f"## {name}", _described(group), _table(OPTION, rows)]
    return _joined(sections)


OPTION = ("option", "default", "values", "meaning")


def components(registry: Registry, kind: Kind) -> str:
    """Describe every component of a kind that this repository contributes."""
    sections = [f"# {kind.name.capitalize()}", ABOUT[kind.name]]
    if kind.base_class.known_tags:
        rows = [(f"`{tag}`", promise) for tag, promise in kind.base_class.known_tags.items()]
        sections += [
            "Tags that components of this kind may have:",
            _table(("tag", "promise"), rows),
        ]
    for name, found in registry.of(kind.name).items():
        if registry.owner(kind.name, name) not in OURS:
            continue
        facts = [("distribution", f"`{registry.owner(kind.name, name)}`"), *_facts(found)]
        prefix = f"{kind.name}.{name}." if kind.name == "calibrator" else f"{kind.name}."
        rows = [_option_row(option, f"{prefix}{option.name}") for option in options_of(found)]
        sections += [f"## {name}", _described(found), _table(("", ""), facts), _table(OPTION, rows)]
    return _joined(sections)


def hooks() -> str:
    """Describe every hook: what a plugin's module may define, and the base class of its classes."""
    rows = [
        (f"`{kind.hook}`", f"`bflcore.{kind.base}`", _described(getattr(hookspecs, kind.hook)))
        for kind in KINDS
    ]
    module = inspect.getdoc(hookspecs) or ""
    example = module.partition("A complete plugin:\n")[2].partition("\n``bfl new-plugin``")[0]
    return _joined(
        [
            "# Hooks",
            HOOKS_ARE,
            _table(("hook", "yields subclasses of", ""), rows),
            "A complete plugin:",
            f"```python\n{inspect.cleandoc(example)}\n```",
        ]
    )


def public_names() -> Mapping[str, list[str]]:
    """Return the public names of `bflcore`, each as ``module.name``, by group."""
    grouped: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in (*bflcore.__all__, "BayesianFederatedClassifier", "BayesianFederatedRegressor"):
        home = _home(name)
        group = next(g for g, starts in GROUPS.items() if home.startswith(starts))
        grouped[group].append(f"{home}.{name}")
    return grouped


def python() -> str:
    """List Python's public names for mkdocstrings, which reads their signatures and docstrings."""
    sections = [
        "# Python",
        "The first part is imported from `bflcore`. Importing it does not import torch.",
    ]
    for group, names in public_names().items():
        sections += [f"## {group}", *(f"::: {name}" for name in names)]
    sections += ["## For authors of plugins"]
    for module, names in FOR_AUTHORS.items():
        sections += [f"::: {module}.{name}" for name in names if f"{module}.{name}" not in sections]
    return _joined(sections)


def _home(name: str) -> str:
    """Return the module that defines a public name."""
    if name not in bflcore.__all__:
        return "bflcore.api.estimators"
    return ELSEWHERE.get(name) or str(getattr(bflcore, name).__module__)


def _facts(found: type[Component]) -> list[tuple[str, str]]:
    """Return what a component declares besides its options."""
    facts = [
        ("also called", ", ".join(f"`{alias}`" for alias in found.aliases)),
        ("reference", found.reference),
        ("posterior family", _code(getattr(found, "family", ""))),
        ("posterior families", _code(*getattr(found, "families", ()))),
        ("tags", _code(*sorted(found.tags))),
    ]
    if isinstance(found, type) and issubclass(found, Method):
        facts += _recipe(found)
    return [(fact, value) for fact, value in facts if value]


def _recipe(method: type[Method]) -> list[tuple[str, str]]:
    """Return the parts and settings that a method chooses."""
    rows = []
    for kind, part in method.parts().items():
        chosen = [f"{option} = {value_text(value)}" for option, value in changed(part).items()]
        rows.append((kind, ", ".join([f"`{part.name}`", *(f"`{text}`" for text in chosen)])))
    named = {"share": method.share, **method.settings}
    return rows + [(name, f"`{value_text(value)}`") for name, value in named.items()]


def _option_row(option: Option, called: str) -> tuple[str, str, str, str]:
    names = ", ".join([f"`{called}`", *(f"`{alias}`" for alias in option.aliases)])
    kind = type_name(option.type)
    values = f"{kind}: {option.allowed}" if option.allowed else kind
    return names, f"`{value_text(option.default) or 'none'}`", values, option.help


def _flags(parameter: click.Option) -> str:
    return ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))


def _described(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _plain(text: str) -> str:
    return " ".join(text.split())


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names if isinstance(name, str) and name)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table; a bar within a cell is escaped. Without rows there is none."""
    found = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not found:
        return ""
    head = list(header)
    lines = [head, ["---"] * len(head), *found]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _joined(sections: Iterable[str]) -> str:
    return "\n\n".join(section for section in sections if section) + "\n"


def main(folder: str) -> None:
    """Write the pages into a folder."""
    for path, text in pages().items():
        file = Path(folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
