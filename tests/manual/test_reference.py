"""Hooks, options, metrics and commands are documented."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import attrs
import click
import pytest

import bflcore
from bflcore.cli import bfl as group
from bflcore.options import options_of
from bflcore.options.kinds import KINDS
from bflcore.options.settings import SETTINGS
from bflcore.registry.loading import load_registry
from bflcore.studies import paper_tables

from .blocks import imported

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REGISTRY = load_registry()
reference = imported(DOCS / "reference_pages.py")
PAGES = reference.pages()
# Of metrics.jsonl: what stands before a metric's own name.
GROUPS = re.compile(r"^((validation|global|novel|personal|calibrated|ood|sample)\.)+")
SMALL = {"clients": 4, "rounds": 1, "local_epochs": 1, "workers": 1, "progress": False}
HELD = {"validation_fraction": 0.2, "calibration_fraction": 0.3, "novel_clients": 1}


def written():
    """Return the text of the pages that people wrote for the manual."""
    folders = ("start", "concepts", "methods", "coming-from", "extending", "reference")
    pages = [*DOCS.glob("*.md"), *(p for f in folders for p in (DOCS / f).glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_component_and_option_is_on_its_kinds_page(kind):
    page = PAGES[f"reference/components/{kind.name}.md"]
    for name, component in REGISTRY.of(kind.name).items():
        if REGISTRY.owner(kind.name, name) not in reference.OURS:
            continue
        assert f"\n## {name}\n" in page
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert component.summary() in section
        for option in options_of(component):
            assert f".{option.name}`" in section, (name, option.name)
            assert option.help.replace("|", "\\|") in section, (name, option.name)


def test_every_setting_is_on_the_page_of_settings():
    page = PAGES["reference/settings.md"]
    for settings in SETTINGS.values():
        for option in options_of(settings):
            assert f"`--{option.name.replace('_', '-')}`" in page
            assert option.help.replace("|", "\\|") in page


def test_every_command_and_flag_is_on_the_page_of_the_command_line():
    page = PAGES["reference/command-line.md"]
    for words, command in reference.commands():
        section = (page + "\n## ").partition(f"\n## {words}\n")[2].partition("\n## ")[0]
        assert section, words
        for parameter in command.get_params(click.Context(command)):
            if isinstance(parameter, click.Option):
                assert all(f"`{flag}`" in section for flag in parameter.opts), (words, parameter)
                assert parameter.name == "help" or getattr(parameter, "help", ""), parameter


def test_every_command_is_used_or_explained_in_the_manual():
    context = click.Context(group)
    text = written()
    unseen = [name for name in group.list_commands(context) if f"bfl {name}" not in text]
    assert unseen == []


def test_every_hook_is_explained_with_an_example():
    text = written()
    for kind in KINDS:
        assert f"`{kind.hook}`" in PAGES["reference/hooks.md"]
        assert f"def {kind.hook}():" in text, kind.hook


def test_every_public_name_of_python_is_referred_to():
    listed = re.findall(r"^::: \S+\.(\w+)$", PAGES["reference/python.md"], re.MULTILINE)
    assert set(bflcore.__all__) - set(listed) == set()


def test_names_for_authors_are_those_of_the_guide():
    rows = re.findall(
        r"^\| `(bflcore\.[\w.]+)` \| (.*) \|$",
        (DOCS / "writing-plugins.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    guide = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    assert guide == {module: set(names) for module, names in reference.FOR_AUTHORS.items()}


def documented():
    text = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fedvi", "data": "digits", "ood": "foreign.npz", **SMALL, **HELD},
        {"method": "fedvi", "data": "boston", **SMALL, **HELD},
        {"method": "pvi", "data": "digits", "ood": "none", **SMALL},
    ],
    ids=["classification", "regression", "sites"],
)
@pytest.mark.filterwarnings("ignore::bflcore.errors.RunWarning")
def test_every_metric_that_runs_record_is_defined(settings, tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    np.savez("foreign.npz", x=np.random.default_rng(0).random((20, 1, 8, 8), dtype=np.float32))
    run = bflcore.run(**settings, out="run")
    lines = Path("run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = {GROUPS.sub("", name) for line in lines for name in json.loads(line)}
    assert {"accuracy", "rmse"} & recorded
    assert ("fpr95" in recorded) == ("ood" in settings and settings["ood"] != "none")
    assert recorded - documented() == set()
    assert run.summary["rounds"] == 1
    assert set(run.summary) - {"method", "rounds", "final", "best"} <= documented()


METHOD = "def report(self, "


def reported():
    """Return what `report` of aggregators and the statistics ``report.NAME`` put into lines."""
    folders = [ROOT / "bflcore", *ROOT.glob("plugins/*/bfl_*")]
    found = set()
    for path in [path for folder in folders for path in sorted(folder.rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.unparse(node).startswith(METHOD):
                found |= {f"aggregator.{key}" for key in returned(node, path)}
            if isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'{REPORTED}"):
                (name,) = node.values[1:]
                assert isinstance(name, ast.Constant), f"{path}: spell it out: {ast.unparse(node)}"
                found.add(f"inference.{name.value}")
    return found


def returned(function, path):
    """Return the keys of the dictionaries that a function returns, which must be spelt out."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            assert isinstance(node.value, ast.Dict), f"{path}: return a literal dict"
            for key in node.value.keys:
                assert isinstance(key, ast.Constant), f"{path}: spell it out: {ast.unparse(key)}"
                yield key.value


def test_every_number_that_a_component_reports_is_defined():
    assert {"aggregator.floored", "inference.corrected"} <= reported()
    assert reported() - documented() == set()


def test_a_key_that_is_not_spelt_out_is_refused():
    (function,) = ast.parse("def report(self, s):\n    return {f'{s}': 1.0}").body
    with pytest.raises(AssertionError, match="spell it out"):
        list(returned(function, "here"))


def test_every_key_of_a_table_to_reproduce_and_every_variable_is_explained():
    text = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    parts = (paper_tables.Metric, paper_tables.Setting, paper_tables.StandIn, paper_tables.Recipe)
    parts += (paper_tables.Column, paper_tables.Row, paper_tables.Claim, paper_tables.Rounds)
    fields = {field.name for part in parts for field in attrs.fields(part)}
    for key in (*paper_tables.TABLE_KEYS, *fields):
        assert re.search(rf"[`\[]{key}[`.\]]", text), key
    sources = "\n".join(path.read_text() for path in (ROOT / "bflcore").rglob("*.py"))
    for name in re.findall(r"environ[^\n]*\"(BFL_\w+)\"", sources):
        assert name in written(), name
