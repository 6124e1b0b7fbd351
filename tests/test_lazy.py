"""Modules that are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points

import pytest

from bflcore.lazy import lazy

MODULE = "bfl_lazy_example"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package importable that has an attribute and a submodule, and forget it afterwards."""
    folder = tmp_path / MODULE
    folder.mkdir()
    (folder / "__init__.py").write_text("answer = 42\n")
    (folder / "late.py").write_text("found = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield MODULE
    for name in [name for name in sys.modules if name.partition(".")[0] == MODULE]:
        del sys.modules[name]


def test_a_module_is_imported_when_an_attribute_is_used(package):
    stand_in = lazy(package)
    assert package not in sys.modules
    assert stand_in.answer == 42
    assert package in sys.modules


def test_a_submodule_that_is_imported_later_is_found(package):
    stand_in = lazy(package)
    assert stand_in.answer == 42
    import_module(f"{package}.late")
    assert stand_in.late.found


def test_an_attribute_that_the_module_lacks_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no attribute 'question'"):
        lazy(package).question  # noqa: B018
    assert not hasattr(lazy(package), "question")


def test_a_module_that_does_not_exist_is_an_import_error_when_it_is_used():
    stand_in = lazy("bfl_no_such_module")
    with pytest.raises(ModuleNotFoundError, match="bfl_no_such_module"):
        stand_in.anything  # noqa: B018


def declaring():
    """Return the modules that declare components: those that entry points name."""
    return ["bflcore", "bflcore.registry.builtin", *(e.module for e in entry_points(group="bfl"))]


@pytest.mark.parametrize("module", sorted(set(declaring())))
def test_declarations_are_imported_without_torch(module):
    source = f"import sys, {module}; sys.exit('torch' in sys.modules and 'torch was imported')"
    found = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("module", ["bflcore.report", "bflcore.studies.sweeps"])
def test_tables_are_compared_without_torch_and_matplotlib(module):
    source = f"import sys, {module}; sys.exit(str({{'torch', 'matplotlib'}} & sys.modules.keys()))"
    command = [sys.executable, "-c", source]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stderr.strip() == "set()"
