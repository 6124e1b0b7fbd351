"""Options as text: what the command line reads and the listings show."""

from __future__ import annotations

import typing
from typing import Any, TypeVar

from bflcore.errors import OptionError
from bflcore.options import (
    Component,
    build,
    find_option,
    label,
    options_of,
    type_name,
    without_none,
)

__all__ = ["parse_spec", "parse_text", "read_value", "spec_text", "value_text"]

C = TypeVar("C", bound=Component)


def parse_text(cls: type[Component], key: str, text: str, where: str) -> object:
    """Read the value of one option from a command-line string, by its declared type."""
    declared = find_option(cls, key, where)
    return read_value(text, declared.type, label(where, declared.name))


def parse_spec(cls: type[C], text: str, where: str) -> C:
    """Build a component from ``name:value,value``: values fill the options in order.

    A boolean option is switched on by its name (``labels:5,random``).
    """
    declared = list(options_of(cls))
    values: dict[str, object] = {}
    for word in filter(None, text.partition(":")[2].split(",")):
        switch = next((d for d in declared if d.type is bool and d.name == word), None)
        if switch is not None:
            values[switch.name] = True
            continue
        field = next((d for d in declared if d.name not in values and d.type is not bool), None)
        if field is None:
            form = ",".join(d.name for d in declared) or "no value"
            raise OptionError(
                f"{where}: {text!r} has a value too many ({word!r}); "
                f"{cls.name} takes {form}: bfl show {cls.kind} {cls.name}"
            )
        values[field.name] = read_value(word, field.type, where)
    return build(cls, values, where)


def spec_text(part: Component) -> str:
    """Return the ``name:value,value`` that `parse_spec` reads back as `part`."""
    values = [(o, getattr(part, o.name)) for o in options_of(type(part))]
    words = [value_text(value) for o, value in values if o.type is not bool]
    words += [o.name for o, value in values if o.type is bool and value]
    return f"{part.name}:{','.join(words)}" if words else part.name


def value_text(value: object) -> str:
    """Return the text that `read_value` reads back as `value`."""
    if isinstance(value, tuple | list):
        return ",".join(map(value_text, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def read_value(text: str, kind: Any, where: str) -> object:
    """Read a value of a type from text; `where` names it in the `OptionError` of a wrong one."""
    try:
        if without_none(kind) is not kind:
            return None if text.lower() == "none" else read_value(text, without_none(kind), where)
        if typing.get_origin(kind) is tuple:
            element = typing.get_args(kind)[0]
            return tuple(read_value(word, element, where) for word in filter(None, text.split(",")))
        return _WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise OptionError(f"{where}: {text!r} is not allowed; allowed: {type_name(kind)}") from None
