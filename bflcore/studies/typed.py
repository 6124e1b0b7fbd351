"""Building frozen classes from TOML: keys and types are checked, lists become tuples."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from bflcore.errors import OptionError, unknown

__all__ = ["build", "tables", "tables_by_name"]

T = TypeVar("T")
NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def build(cls: type[T], values: object, where: str) -> T:
    """Build an attrs class from the values of a TOML table; tables within become classes, too.

    Raises `OptionError` for unknown and missing keys, and for values of another type.
    """
    what = cls.__name__.lower()
    fields = {field.name: field for field in attrs.fields(attrs.resolve_types(cast("Any", cls)))}
    if not isinstance(values, Mapping):
        raise _refused(values, f"a table with {', '.join(fields)}", where)
    for key in values:
        if key not in fields:
            raise unknown(f"key of a {what} in {where}", key, fields)
    for key, field in fields.items():
        if field.default is attrs.NOTHING and key not in values:
            raise OptionError(f"{where}: a {what} lacks the key {key}; add it")
    return cls(**{k: _typed(v, fields[k].type, f"{where}: {k}") for k, v in values.items()})


def tables(values: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """Return the tables ``[[key]]`` of a file. Raises `OptionError` if they are something else."""
    found = values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise OptionError(f"{where}: {key} is not a list of tables; write [[{key}]]")
    return found


def tables_by_name(values: Mapping[str, Any], key: str, where: str) -> dict[str, dict[str, Any]]:
    """Return the tables ``[key.NAME]`` of a file. Raises `OptionError` for something else."""
    found = values.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise OptionError(f"{where}: {key} does not have a table per name; write [{key}.NAME]")
    return found


def _typed(value: object, kind: Any, where: str) -> object:
    """Return a value as a type of a field."""
    members = _members(kind)
    if isinstance(value, Mapping) and (classes := [one for one in members if attrs.has(one)]):
        return build(classes[0], value, where)
    if isinstance(value, list) and get_origin(kind) is tuple:
        value = tuple(value)
    if not any(_fits(value, one) for one in members):
        raise _refused(value, _words(kind), where)
    return value


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)


def _fits(value: object, kind: Any) -> bool:
    """Say whether a value is of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return value in inner
    if origin is tuple:
        whole = isinstance(value, tuple) and (inner[-1] is ... or len(inner) == len(value))
        return whole and all(_fits(one, inner[0]) for one in cast("tuple[Any, ...]", value))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(one, inner[1]) for one in value.values())
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return any(_fits(value, one) for one in inner) if inner else isinstance(value, kind)


def _words(kind: Any) -> str:
    """Return a type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(inner)
    if origin is tuple:
        many = "a list of" if inner[-1] is ... else f"a list of {len(inner)} times"
        return f"{many} {_words(inner[0])}"
    if origin in (types.UnionType, Union):
        return " or ".join(_words(one) for one in inner if one is not type(None))
    if origin is Mapping or attrs.has(kind):
        return "a table"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _refused(value: object, allowed: str, where: str) -> OptionError:
    return OptionError(f"{where}: {value!r} is not allowed; allowed: {allowed}")
