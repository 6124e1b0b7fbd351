"""The hooks: one per kind, documented, without arguments, as the table of kinds says."""

import inspect
import sys

import pluggy
import pytest
import torch

from bflcore import Point, hookimpl
from bflcore.experiments.resolve import resolve
from bflcore.options.kinds import KINDS
from bflcore.registry import builtin, hookspecs
from bflcore.registry.hookspecs import GROUP
from bflcore.registry.loading import read_plugins

SPECS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{GROUP}_spec")}


def test_every_kind_has_exactly_one_hook_and_every_hook_a_kind():
    assert sorted(kind.hook for kind in KINDS) == sorted(SPECS)


def test_the_marker_marks_for_the_group_of_the_entry_points():
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    assert {name for name in vars(manager.hook) if name.startswith("bfl_")} == set(SPECS)
    assert hasattr(hookimpl(lambda: None), f"{GROUP}_impl")


@pytest.mark.parametrize("name", SPECS)
def test_a_hook_takes_no_arguments_says_what_it_yields_and_is_documented(name):
    signature = inspect.signature(SPECS[name])
    assert not signature.parameters
    assert signature.return_annotation.startswith("Iterable[type[")
    assert SPECS[name].__doc__.startswith("Yield ")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_hook_yields_subclasses_of_its_kinds_base(kind):
    annotation = inspect.signature(SPECS[kind.hook]).return_annotation
    assert annotation == f"Iterable[type[{kind.base_class.__name__}]]"


def test_the_core_implements_hooks_with_no_name_of_its_own():
    implemented = {name for name in vars(builtin) if name.startswith("bfl_")}
    assert implemented <= set(SPECS)
    registry = read_plugins(builtin)
    core = registry.plugins[0]
    assert core.name == "bflcore"
    assert {kind for kind, _ in core.components} == {
        kind.name for kind in KINDS if kind.hook in implemented
    }


def test_the_example_of_the_documentation_is_a_working_plugin(tmp_path, monkeypatch):
    text = inspect.getdoc(hookspecs)
    code = text.partition("# bfl_mine/plugin.py\n")[2].partition("\nDeclaring")[0]
    (tmp_path / "bfl_mine").mkdir()
    (tmp_path / "bfl_mine" / "plugin.py").write_text(inspect.cleandoc("\n" + code))
    info = tmp_path / "bfl_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bfl-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bfl]\nmine = bfl_mine.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = read_plugins(builtin)
    plugin = next(plugin for plugin in registry.plugins if plugin.name == "bfl-mine")
    assert (plugin.state, plugin.reason) == ("ok", "")
    experiment = resolve(registry, "latest", {}, {"aggregator": {"back": 2}})
    assert (experiment.aggregator.back, experiment.run.rounds) == (2, 10)
    posteriors = Point(torch.arange(6.0).reshape(3, 2))
    fused = experiment.aggregator.fuse(posteriors, torch.ones(3), posteriors[0])
    assert fused.mean.tolist() == [2.0, 3.0]
    for name in [name for name in sys.modules if name.startswith("bfl_mine")]:
        monkeypatch.delitem(sys.modules, name)
