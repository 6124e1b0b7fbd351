"""The table of kinds: what is written elsewhere about kinds agrees with it."""

import inspect
from importlib import import_module

import pytest

import bflcore
from bflcore import Component, OptionError
from bflcore.options.kinds import KINDS, kind_called
from bflcore.options.settings import DataSettings
from bflcore.registry.loading import Registry, load_registry


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_base_is_a_component_of_its_kind_and_public(kind):
    assert issubclass(kind.base_class, Component)
    assert kind.base_class.kind == kind.name
    assert kind.base in bflcore.__all__


def test_the_registry_declares_the_type_of_every_kind():
    declared = inspect.get_annotations(Registry)
    assert declared == {kind.plural: f"View[{kind.base_class.__name__}]" for kind in KINDS}


def test_defaults_and_checks_exist():
    for kind in KINDS:
        assert not kind.default or kind.default in load_registry().of(kind.name)
        assert not kind.checks or import_module(f"bflcore.testing.{kind.checks}").checks_of
        assert not kind.setting or hasattr(DataSettings(), kind.setting)


def test_an_unknown_kind_is_answered_with_the_nearest():
    with pytest.raises(OptionError, match=r"unknown kind 'metod' \(did you mean method\?\)"):
        kind_called("metod")
