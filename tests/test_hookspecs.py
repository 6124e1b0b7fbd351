"""The hooks: one a kind, documented, without arguments; drift between table and specs is red."""

import inspect
import sys

import pluggy
import pytest

from bflcore import Aggregator, hookimpl
from bflcore.options import Component
from bflcore.registry import builtin, hookspecs
from bflcore.registry.hookspecs import GROUP, HOOKS
from bflcore.registry.loading import read_plugins

SPECS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{GROUP}_spec")}


def test_every_kind_has_exactly_one_hook_and_every_hook_a_kind():
    assert sorted(HOOKS.values()) == sorted(SPECS)
    assert len(set(HOOKS.values())) == len(HOOKS)


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


@pytest.mark.parametrize("kind", HOOKS)
def test_what_a_hook_yields_is_a_base_of_that_kind(kind):
    annotation = inspect.signature(SPECS[HOOKS[kind]]).return_annotation
    base = annotation.removeprefix("Iterable[type[").removesuffix("]]")
    source = inspect.getsource(hookspecs)
    line = next(
        one
        for one in source.splitlines()
        if one.strip().startswith("from bflcore")
        and base in one.partition(" import ")[2].split(", ")
    )
    module = line.split()[1]
    __import__(module)
    found = getattr(sys.modules[module], base)
    assert issubclass(found, Component)
    assert found.kind == kind


def test_the_core_implements_hooks_with_no_name_of_its_own():
    implemented = {name for name in vars(builtin) if name.startswith("bfl_")}
    assert implemented <= set(SPECS)
    registry = read_plugins(builtin)
    core = registry.plugins[0]
    assert core.name == "bflcore"
    assert {kind for kind, _ in core.components} == {
        kind for kind, hook in HOOKS.items() if hook in implemented
    }


def test_the_example_of_the_documentation_is_a_working_plugin():
    example = inspect.getdoc(hookspecs).partition("# bfl_mine/plugin.py\n")[2]
    code = inspect.cleandoc("\n" + example.partition("\nDeclaring")[0])
    made = {"__name__": __name__}
    exec(code, made)
    (newest,) = made["bfl_aggregators"]()
    assert issubclass(newest, Aggregator)
    assert newest.kind == "aggregator"
    assert newest.name == "newest"
