"""What a component must declare to be registered: whatever lists components relies on it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import attrs

from bflcore.errors import PluginError, nearest
from bflcore.options import options_of
from bflcore.options.kinds import Kind

__all__ = ["check_component"]


def check_component(component: Any, kind: Kind) -> None:
    """Raise `PluginError` unless what a hook yielded is a complete component of the kind."""
    fits = isinstance(component, type) and issubclass(component, kind.base_class)
    if not fits or component.kind != kind.name:
        raise PluginError(
            f"{kind.hook} yielded {component!r}; expected a subclass of bflcore.{kind.base}"
        )
    for fault in _faults(component):
        raise PluginError(f"{kind.hook} yielded {component.__name__}{fault}")


def _faults(component: Any) -> Iterator[str]:
    """Yield what is wrong with a subclass of its kind's base."""
    if not _is_name(getattr(component, "name", None)):
        yield ", which has no name"
    if not _are_names(component.aliases):
        yield "; its aliases must be a tuple of names"
    for base in component.__mro__:
        for name, annotation in inspect.get_annotations(base).items():
            if "ClassVar" in str(annotation) and not hasattr(component, name):
                yield f", which has no {name}; write {name} = ... in the class"
    if abstract := sorted(getattr(component, "__abstractmethods__", ())):
        yield f", which does not define {' and '.join(abstract)}"
    if not _are_names(getattr(component, "families", ())):
        yield '; its families must be a tuple of names, as in families = ("gaussian",)'
    if not isinstance(component.reference, str):
        yield "; its reference must be text"
    if not isinstance(component.expected_failures, Mapping):
        yield "; its expected_failures must be a mapping of checks to reasons"
    if not (isinstance(component.tags, Set) and all(map(_is_name, component.tags))):
        yield '; its tags must be a set of names, as in tags = frozenset({"pools"})'
    yield from _unknown("tag", component.tags, component.known_tags)
    if not isinstance(getattr(component, "needs", {}), Mapping):
        yield "; its needs must be a mapping of kinds to tags"
    yield from _of_options(component)


def _of_options(component: Any) -> Iterator[str]:
    fields = {field.name: field for field in attrs.fields(component)} if _built(component) else {}
    if not _are_names(component.hides):
        yield "; its hidden options must be a tuple of names"
    yield from _unknown("hidden option", component.hides, fields)
    for name, field in fields.items():
        if field.default is attrs.NOTHING:
            yield f', whose option {name} has no default; write option(default, "help")'
    try:
        options_of(component)
    except Exception as error:  # noqa: BLE001 - an annotation may name anything
        yield (
            f", whose options have types that cannot be read ({type(error).__name__}: {error}); "
            "allowed are bool, int, float, str, tuples of them, and None"
        )


def _built(component: Any) -> bool:
    """Return whether the class has options as fields; a posterior's are tensors."""
    return component.kind != "posterior" and attrs.has(component)


def _unknown(what: str, given: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    for name in sorted(set(given) - set(known)):
        allowed = ", ".join(known) or "none"
        yield f": unknown {what} {name!r}{nearest(name, known)}; allowed: {allowed}"


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_name, value))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
