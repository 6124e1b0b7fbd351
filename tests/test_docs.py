"""What the documentation names exists: components, commands, flags, options; examples run."""

from __future__ import annotations

import difflib
import importlib
import re
import shlex
import sys
import textwrap
import types
from pathlib import Path

import click
import pytest

from bflcore import Aggregator, HyperUpdate, IncompatibleError, LocalInference
from bflcore.cli import bfl as group
from bflcore.cli.run import resolved
from bflcore.options import options_of
from bflcore.options.kinds import CONFIGURABLE, KINDS
from bflcore.options.settings import SETTINGS
from bflcore.registry import builtin
from bflcore.registry.loading import Plugin, load_registry, read_plugins
from bflcore.testing import checks, method_checks

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
GUIDE = ROOT / "docs" / "writing-plugins.md"
OTHER_KINDS = ROOT / "docs" / "extending" / "kinds.md"
PAGES = [
    README,
    CONTRIBUTING,
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]
REGISTRY = load_registry()
OURS = {"bflcore", *(f"bfl-{folder.name}" for folder in ROOT.glob("plugins/*"))}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# Flags that the pages mention and that belong to other programs.
FOREIGN_FLAGS = {
    "--import-mode": "pytest",
    "--insecure": "Flower",
    "--node-config": "Flower",
}
# First words of command lines whose flags are not ours.
FOREIGN_PROGRAMS = ("apt-get", "docker", "flower-", "flwr", "git", "make", "pip", "python", "sh ")
NAME = r"[a-z][a-z0-9-]*"


def ours(kind):
    """Return the names of the core's and this repository's plugins' components of a kind."""
    return {name for name in REGISTRY.of(kind) if REGISTRY.owner(kind, name) in OURS}


def spans(text):
    """Return every piece of code, inline or fenced, one command line each."""
    blocks = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^ *```[^\n]*\n.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [line.split(" #")[0].strip() for line in lines] + inline


def tables(text):
    """Return every table as a list of rows, each a list of cells."""
    found = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    cells = [
        [[c.strip() for c in row.strip("|").split("|")] for row in t.splitlines()] for t in found
    ]
    return [[rows[0], *rows[2:]] for rows in cells]


def named(text):
    """Return the names in inline code, without what follows a colon."""
    found = re.findall(rf"`({NAME})(?::[^`]*)?`", text)
    return set(found)


def mismatch(found, expected):
    """Say which names are missing and which do not exist; return ``""`` if there are none."""
    sets = {"missing": expected - found, "unknown": found - expected}
    return "; ".join(f"{what}: {' '.join(sorted(names))}" for what, names in sets.items() if names)


def of_row(word):
    """Return the names in the README's table row, or paragraph, about `word`."""
    text = README.read_text(encoding="utf-8")
    for table in tables(text):
        for row in table:
            if word in re.sub(r"[*`]", "", row[0]).lower():
                return named(" ".join(row[1:]))
    paragraph = re.search(rf"[*#]+ ?{word}s?\b.*?(?=\n\n|\n\*\*)", text, re.DOTALL | re.IGNORECASE)
    assert paragraph, f"README.md has no table row or paragraph about {word}"
    return named(paragraph[0])


def of_column(header):
    """Return the first column of the README's table under this header."""
    for table in tables(README.read_text(encoding="utf-8")):
        if table[0][0].lower() == header:
            return " ".join(row[0] for row in table[1:])
    return pytest.fail(f"README.md has no table with the first column {header!r}")


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("posterior", "posterior"),
        ("inference", "inference"),
        ("aggregator", "aggregator"),
        ("weighting", "weighting"),
        ("hyper", "hyper"),
        ("calibrator", "calibrator"),
    ],
)
def test_the_readme_lists_every_component(word, kind):
    assert mismatch(of_row(word), ours(kind)) == ""


def test_the_readme_lists_every_method():
    assert mismatch(named(of_column("method")), ours("method")) == ""


def test_the_readme_lists_every_command():
    found = set(re.findall(rf"`bfl ({NAME})", of_column("command")))
    assert mismatch(found, set(group.list_commands(click.Context(group)))) == ""


@pytest.mark.parametrize(
    ("word", "kind"), [("data", "dataset"), ("model", "model"), ("partition", "partition")]
)
def test_the_readme_names_every_data_set_model_and_partition(word, kind):
    text = README.read_text(encoding="utf-8")
    assert ours(kind) - named(text) == set()
    strangers = (of_row(word) if word != "partition" else named(text)) - ours(kind)
    registered = {name for one in KINDS for name in REGISTRY.of(one.name)}
    near = {s: difflib.get_close_matches(s, ours(kind), 1, 0.8) for s in strangers - registered}
    assert {name: right for name, right in near.items() if right} == {}


def commands():
    """Return every command with its path, groups entered."""

    def walk(path, command):
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from walk(f"{path} {name}", command.get_command(context, name))

    return dict(walk("bfl", group))


COMMANDS = commands()
FLAGS = {
    flag
    for command in COMMANDS.values()
    for parameter in command.get_params(click.Context(command))
    for flag in (*parameter.opts, *parameter.secondary_opts)
}


def benchmark_flags():
    scripts = ROOT.glob("benchmarks/*.py")
    return {flag for s in scripts for flag in re.findall(r'"(--[a-z-]+)"', s.read_text())}


@each_page
def test_commands_that_a_page_mentions_exist(page):
    found = {
        words
        for span in spans(page.read_text(encoding="utf-8"))
        for words in re.findall(rf"(?:^|\s)(bfl {NAME})(?=\s|$)", span)
    }
    assert found - COMMANDS.keys() == set()


@each_page
def test_what_a_page_lists_or_shows_exists(page):
    text = " ; ".join(spans(page.read_text(encoding="utf-8")))
    known = {kind.name: REGISTRY.of(kind.name) for kind in KINDS} | {"settings": SETTINGS}
    listed = re.findall(rf"bfl list ({NAME})", text)
    assert set(listed) - known.keys() == set()
    shown = re.findall(rf"bfl show ({NAME}) ([\w-]+)", text)
    wrong = [(k, n) for k, n in shown if not (n.isupper() and k in known)]
    assert [(k, n) for k, n in wrong if n not in known.get(k, ())] == []


@each_page
def test_components_that_a_command_of_a_page_chooses_exist(page):
    text = page.read_text(encoding="utf-8")
    commands = " ; ".join(spans(text))
    # Not those that the page itself declares or creates.
    own = set(re.findall(rf'(?:bfl new-plugin |^ *name = ")({NAME})', text, re.MULTILINE))
    chosen = [("method", name) for name in re.findall(rf"bfl run ({NAME})(?=\s|$)", commands)]
    for kind in KINDS:
        if kind.name in CONFIGURABLE:
            flag = (kind.setting or kind.name).replace("_", "-")
            # A colon begins numbers, but not those of a user's own module:factory.
            names = re.findall(rf"--{flag} ({NAME})(?=\s|$|:[\d.])", commands)
            chosen += [(kind.name, name) for name in names]
    assert {(kind, n) for kind, n in chosen if n not in REGISTRY.of(kind) and n not in own} == set()


@each_page
def test_options_that_a_page_sets_exist(page):
    known = {
        f"{kind}.{name}"
        for kind in CONFIGURABLE
        for component in REGISTRY.of(kind).values()
        for option in options_of(component)
        for name in (option.name, *option.aliases)
    } | {
        f"calibrator.{component.name}.{option.name}"
        for component in REGISTRY.calibrators.values()
        for option in options_of(component)
    }
    kinds = "|".join(CONFIGURABLE)
    mentioned = {
        option
        for span in spans(page.read_text(encoding="utf-8"))
        for option in [
            *re.findall(r"-o ((?:calibrator\.)?[a-z-]+\.[a-z]\w*)", span),
            *re.findall(rf"^((?:{kinds})\.[a-z]\w*) ?=", span),
        ]
    }
    assert mentioned - known == set()


@each_page
def test_flags_that_a_page_mentions_exist(page):
    mentioned = {
        flag
        for span in spans(page.read_text(encoding="utf-8"))
        if not span.removeprefix("$ ").startswith(FOREIGN_PROGRAMS)
        for flag in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", span)
    }
    assert mentioned - FLAGS - FOREIGN_FLAGS.keys() - benchmark_flags() == set()


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/methods/*.md")), ids=lambda page: page.stem)
def test_a_page_about_methods_says_how_to_install_them(page):
    text = page.read_text(encoding="utf-8")
    (line,) = re.findall(r"`pip install '\.\[data\]' ([^`]+)`", text)
    if page.stem == "index":
        assert line == "plugins/NAME"
        return
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in line.split())
    installed = {"bflcore", *(folder.replace("plugins/", "bfl-") for folder in line.split())}
    runs = set(re.findall(rf"^bfl run ({NAME})", text, re.MULTILINE))
    owners = {REGISTRY.owner("method", name) for name in runs & REGISTRY.methods.keys()}
    assert owners - installed == set()


def test_options_have_one_name_everywhere():
    """``-o PART.OPTION``, as help texts and errors say."""
    sources = [*ROOT.glob("bflcore/**/*.py"), *ROOT.glob("plugins/*/bfl_*/**/*.py"), *PAGES]
    another = [p for p in sources if re.search(r"KIND\.OPTION", p.read_text(encoding="utf-8"))]
    assert another == []
    assert "PART.OPTION" in README.read_text(encoding="utf-8")


@pytest.fixture(params=[CONTRIBUTING, GUIDE, OTHER_KINDS], ids=lambda page: page.stem)
def example(request, monkeypatch):
    """Execute a page's Python blocks in one module; return what it defines."""
    text = request.param.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    assert blocks, f"{request.param} has no Python example"
    imported = re.findall(r"^ *from (bfl_\w+)(\.\w+)? import", text, re.MULTILINE)
    names = {"".join(parts) for parts in imported} | {"bfl_mine.plugin"}
    module = types.ModuleType("bfl_mine.plugin")
    for name in names | {name.partition(".")[0] for name in names}:
        monkeypatch.setitem(sys.modules, name, module)
    for block in blocks:
        exec(compile(textwrap.dedent(block), str(request.param), "exec"), vars(module))
    return vars(module)


def test_the_examples_for_authors_register_components_that_pass_the_checks(example, monkeypatch):
    hooks = {kind.hook for kind in KINDS}
    implemented = [name for name in example if name.startswith("bfl_")]
    assert implemented
    assert set(implemented) <= hooks
    components = [component for name in implemented for component in example[name]()]
    registry = read_plugins(builtin)
    registry.add(Plugin("bfl-mine", "1", "bfl_mine.plugin"), components)
    monkeypatch.setattr(method_checks, "_registry", lambda _: registry)  # as if it were installed
    for component in components:
        assert registry.of(component.kind)[component.name] is component
        outcomes = {check.name: check.outcome() for check in checks(component)}
        # The example has no file that could be imported without torch.
        outcomes.pop("declares itself without torch")
        assert {n: o.reason for n, o in outcomes.items() if o.state == "failed"} == {}


def rows_under(header):
    """Return the rows of the guide's table with this first header."""
    found = [table for table in tables(GUIDE.read_text(encoding="utf-8")) if table[0][0] == header]
    assert len(found) == 1, header
    return found[0][1:]


def test_the_guide_gives_every_tag_of_an_aggregator_with_its_promise():
    listed = {name.strip("`"): promise for name, promise in rows_under("tag")}
    assert listed == dict(Aggregator.known_tags)


@pytest.mark.parametrize("kind", [LocalInference, HyperUpdate])
def test_the_guide_names_every_other_tag(kind):
    text = " ".join(GUIDE.read_text(encoding="utf-8").split())
    for tag, promise in kind.known_tags.items():
        assert f"`{tag}`" in text
        assert promise.replace("(declared)", "").replace("(checked)", "").strip() in text


def test_what_the_guide_calls_public_is_exported_by_its_module():
    for module, names in rows_under("module"):
        exported = importlib.import_module(module.strip("`")).__all__
        assert named(names) | {n.strip("`") for n in names.split(", ")} <= set(exported)


def shown_runs(page):
    """Yield the words of each complete ``bfl run`` that a page shows."""
    for line in spans(page.read_text(encoding="utf-8")):
        found = re.match(r"(?:\$ )?bfl run ([^#]*)", line)
        # Not those with placeholders: FOLDER, ..., $PWD, N.
        if found and not re.search(r"\.\.\.|\$|(?<![\w-])[A-Z]{1,}(?![\w-])", found[1]):
            yield shlex.split(found[1].split(";")[0])


@each_page
def test_runs_that_a_page_shows_are_valid_experiments(page):
    text = page.read_text(encoding="utf-8")
    own = set(re.findall(rf'(?:bfl new-plugin |^ *name = ")({NAME})', text, re.MULTILINE))
    for words in shown_runs(page):
        if own & set(words) or "--help" in words or words[0].endswith(".toml"):
            continue
        given = COMMANDS["bfl run"].make_context("run", list(words)).params
        for name in ("out", "quiet", "as_json"):
            given.pop(name)
        resolved(REGISTRY, **given)


def test_an_invalid_run_on_a_page_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```\nbfl run fedvi --aggregator median \\\n    --data digits\n```\n`bfl run METHOD`"
    )
    assert [*shown_runs(page)] == [["fedvi", "--aggregator", "median", "--data", "digits"]]
    page.write_text("`bfl run pvi --aggregator average`")
    with pytest.raises(IncompatibleError, match="average"):
        test_runs_that_a_page_shows_are_valid_experiments(page)
