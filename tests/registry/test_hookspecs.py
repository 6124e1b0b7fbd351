"""The hooks: one per kind, documented, without arguments, as the table of kinds says."""

import inspect
import os
import sys
import textwrap
import tomllib

import pluggy
import pytest
import torch

from bflcore import Gaussian, hookimpl
from bflcore.options.kinds import KINDS
from bflcore.registry import builtin, hookspecs
from bflcore.registry.hookspecs import GROUP
from bflcore.registry.loading import load_registry, read_plugins

from ..cli.quick import QUICK

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


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Install the plugin of the documentation, exactly as it is written there."""
    text = inspect.getdoc(hookspecs)
    project, _, code = text.partition("# bfl_mine/plugin.py\n")
    entry = tomllib.loads(
        textwrap.dedent(project.partition("pyproject.toml\n")[2]).replace("# ", "")
    )
    code = code.partition("\n``bfl new-plugin``")[0]
    package = tmp_path / "installed" / "bfl_mine"
    package.mkdir(parents=True)
    (package / "plugin.py").write_text(textwrap.dedent(code))
    info = package.parent / "bfl_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bfl-mine\nVersion: 1.0\n")
    ((name, module),) = entry["project"]["entry-points"]["bfl"].items()
    (info / "entry_points.txt").write_text(f"[bfl]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    load_registry.cache_clear()
    yield "bfl-mine"
    load_registry.cache_clear()
    for name in [name for name in sys.modules if name.startswith("bfl_mine")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_example_of_the_documentation_is_a_plugin_that_passes_every_check(bfl, example):
    status, out, err = bfl("check-plugin", example)
    assert (status, err) == (0, ""), out


def test_beside_the_example_of_the_documentation_everything_works(bfl, example):
    status, out, err = bfl("matrix")
    assert (status, err) == (0, "")
    assert out.count("midrange") == len(load_registry().inferences)
    status, _, err = bfl("run", "fedavg", "--hyper", "empirical-bayes")  # refused
    assert status == 2
    assert "hypers that fit: accumulate, continual, dual-update, fixed" in err
    status, _, err = bfl("run", "fed-midrange", *QUICK, "--quiet", "--out", "one")
    assert (status, err) == (0, "")
    status, _, err = bfl("run", "fedvi", *QUICK, "--quiet", "--aggregator", "midrange", "-o",
                         "aggregator.spread=largest", "--out", "two")  # fmt: skip
    assert (status, err) == (0, "")


def test_the_rule_of_the_example_is_the_middle_of_the_clients(example):
    rule = load_registry().aggregators["midrange"]
    mean, variance = torch.tensor([[1.0], [2.0], [7.0]]), torch.tensor([[1.0], [0.5], [3.0]])
    posteriors, weights = Gaussian(mean, variance), torch.tensor([9.0, 1.0, 1.0])
    fused = rule(spread="largest").fuse(posteriors, weights, posteriors[0])
    assert (float(fused.mean), float(fused.variance)) == (4.0, 3.0)
    assert float(rule().fuse(posteriors, weights, posteriors[0]).variance) == 1.75
