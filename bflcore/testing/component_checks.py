"""Checks of all components: frozen, named, documented, storable and quick to import."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache

import attrs

from bflcore.options import Component, as_dict, build, options_of
from bflcore.options.kinds import FITTED
from bflcore.options.text import parse_text, value_text

__all__ = ["checks_of"]

Part = type[Component]

WORDS = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
CITED = ("method", "inference", *FITTED)


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of every kind."""
    yield from (is_frozen, is_named, is_documented)
    if part.kind != "posterior" and attrs.has(part) and attrs.fields(part):  # no tensors there
        yield explains_its_options
    if options_of(part):
        yield from (options_survive_storage, options_can_be_typed)
    yield declares_itself_without_torch


def is_frozen(part: Part) -> None:
    """No field can be assigned after construction."""
    for field in attrs.fields(part) if attrs.has(part) else ():
        try:
            setattr(object.__new__(part), field.name, None)
        except attrs.exceptions.FrozenInstanceError:
            continue
        except Exception:  # noqa: BLE001, S110 - rejected by a validator, but assignable
            pass
        raise AssertionError(f"{field.name} can be assigned; decorate the class with @component")
    fields = {field.name for field in attrs.fields(part)} if attrs.has(part) else set()
    for name, annotation in inspect.get_annotations(part).items():
        if not (name in fields or name.startswith("_") or "ClassVar" in str(annotation)):
            raise AssertionError(
                f"{name} looks like an option; decorate the class with @component, or annotate "
                "it as a ClassVar"
            )


def is_named(part: Part) -> None:
    """Names and aliases are lower-case words joined by hyphens."""
    for name in (part.name, *part.aliases):
        if not WORDS.fullmatch(name):
            raise AssertionError(
                f"{name!r} is not lower-case words joined by hyphens, as in {_hyphened(name)!r}"
            )


def is_documented(part: Part) -> None:
    """The class has its own docstring, and a reference if its kind requires one."""
    if not (part.__dict__.get("__doc__") or "").strip():
        raise AssertionError(f"{part.__name__} has no docstring; bfl list shows its first line")
    if not part.summary().endswith("."):
        raise AssertionError(
            f"the docstring's first line must be a sentence with a full stop: {part.summary()!r}"
        )
    if part.kind in CITED and not part.reference:
        raise AssertionError('reference is empty; give the paper, year and equation, or "new"')


def explains_its_options(part: Part) -> None:
    """Every field is an option with a line of help."""
    for field in attrs.fields(part) if attrs.has(part) else ():
        if "help" not in field.metadata:
            raise AssertionError(
                f"field {field.name} is not an option, so it would be neither stored nor listed; "
                'declare it as option(default, "help")'
            )
    for option in options_of(part):
        if not option.help.strip():
            raise AssertionError(f"option {option.name} has no help; describe it in one line")


def options_survive_storage(part: Part) -> None:
    """``build(type(p), as_dict(p)) == p`` for the defaults."""
    instance = part()
    stored = as_dict(instance)
    del stored["name"]
    if build(part, stored, part.kind) != instance:
        raise AssertionError(
            f"stored as {stored}, the options come back different; allowed are bool, int, float, "
            "str, tuples of them, and None as a default"
        )


def options_can_be_typed(part: Part) -> None:
    """Every default can be given on the command line."""
    for option in options_of(part):
        value = option.default
        text = value_text(value)
        read = parse_text(part, option.name, text, part.kind)
        if read != value:
            raise AssertionError(
                f"option {option.name}: the default {value!r} typed as {text!r} is read as "
                f"{read!r}; choose another default, or another type"
            )


def declares_itself_without_torch(part: Part) -> None:
    """Importing the module that declares the part does not import torch: listings are fast."""
    _import_without_torch(part.__module__)


@cache
def _import_without_torch(module: str) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print('torch' in sys.modules)"
    found = subprocess.run(  # noqa: S603 - this interpreter, on a module that is already loaded
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if found.returncode:
        said = found.stderr.strip() or f"exit status {found.returncode}"
        raise AssertionError(f"import {module} fails: {said.splitlines()[-1]}")
    if found.stdout.split()[-1:] == ["True"]:
        raise AssertionError(
            f"import {module} imports torch, which makes every bfl command slow; import torch in "
            'the methods that use it, or write torch = lazy("torch") (bflcore.lazy)'
        )


def _hyphened(name: str) -> str:
    """Return a similar name that is allowed."""
    words = re.findall("[A-Z]+[a-z0-9]*|[a-z0-9]+", name)
    return "-".join(words).lower() or "my-part"
