"""Grids: every combination of methods, listed settings and the values of several axes."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from bflcore.api.flags import SHORT
from bflcore.errors import OptionError, unknown
from bflcore.experiments.resolve import CALIBRATOR
from bflcore.options import options_of
from bflcore.options.kinds import CONFIGURABLE, PARTS
from bflcore.options.settings import DataSettings, RunSettings
from bflcore.options.text import read_value, value_text
from bflcore.studies.cells import RESERVED, Cell

__all__ = ["Axis", "Entry", "axis_of", "cells_of", "parse_axis", "read_list"]

LONGEST = 120  # characters of a folder's name before it is cut


@attrs.frozen
class Axis:
    """A flag (``partition``) or an option (``inference.kl_weight``) with its values."""

    key: str
    values: tuple[Any, ...]

    @property
    def of_part(self) -> bool:
        """Whether this is an option of a part."""
        return "." in self.key


@attrs.frozen
class Entry:
    """Settings from a list, combined with every point of a grid."""

    name: str = ""
    method: str = ""
    flags: Mapping[str, Any] = attrs.field(factory=dict)
    options: Mapping[str, object] = attrs.field(factory=dict)


def parse_axis(text: str) -> Axis:
    """Read ``KEY=A,B``, or ``KEY=A;B`` for values that have commas. Raises `OptionError`."""
    key, equals, given = text.partition("=")
    if not equals or not key.strip():
        raise OptionError(
            f"--grid: {text!r} is not allowed; allowed: KEY=A,B with a flag or PART.OPTION, for "
            "example inference.kl_weight=0.1,1 or 'partition=iid;labels:5'"
        )
    words = [word.strip() for word in given.split(";" if ";" in given else ",")]
    if ";" in given and len(words) > 1 and not words[-1]:
        words.pop()  # a single value with commas ends in a semicolon
    if not all(words):
        raise OptionError(f"--grid: {text!r} has an empty value; leave it out")
    return axis_of(key.strip(), words)


def axis_of(key: str, values: Sequence[Any]) -> Axis:
    """Return an axis; text becomes values of the flag's type. Raises `OptionError`."""
    name = key if "." in key else key.removeprefix("--").replace("-", "_")
    _check_key(name)
    if isinstance(values, str) or not values:
        raise OptionError(f"--grid: {key} needs at least one value, in a list")
    types = {o.name: o.type for cls in (RunSettings, DataSettings) for o in options_of(cls)}
    if name in types:
        values = [
            read_value(v, types[name], f"--grid: {key}") if isinstance(v, str) else v
            for v in values
        ]
    texts = [value_text(value) for value in values]
    for text in texts:
        if texts.count(text) > 1:
            raise OptionError(f"--grid: {key} has the value {text} twice; name it once")
    return Axis(name, tuple(values))


def _check_key(name: str) -> None:
    part = name.partition(".")[0]
    if "." in name:
        if part not in {*CONFIGURABLE, CALIBRATOR}:
            raise unknown("part of --grid", part, [*CONFIGURABLE, CALIBRATOR])
        return
    if name in RESERVED:
        raise OptionError(f"--grid: {name} is not a setting of a cell; use --seeds and --out")
    settings = {o.name for cls in (RunSettings, DataSettings) for o in options_of(cls)} - {"seed"}
    known = {*settings, *PARTS, *(flag.replace("-", "_") for flag in SHORT)}
    if name not in known:
        raise unknown("flag of --grid", name, known, "or PART.OPTION")


def read_list(path: Path) -> list[Entry]:
    """Read the entries of a file: tables ``[[cell]]`` with flags and a table ``options``.

    Each may have a ``name`` and a ``method``. Raises `OptionError` for another form.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--list: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise OptionError(f"--list: {path} is not valid TOML: {str(error)[:200]}") from None
    tables = found.pop("cell", [])
    plain = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if found or not plain or not tables:
        raise OptionError(f"--list: {path} may have tables [[cell]] alone, and needs at least one")
    return [_entry(dict(table), path) for table in tables]


def _entry(table: dict[str, Any], path: Path) -> Entry:
    name, method = table.pop("name", ""), table.pop("method", "")
    options = table.pop("options", {})
    if not (isinstance(name, str) and isinstance(method, str) and isinstance(options, dict)):
        raise OptionError(f"--list: {path}: name and method are text, options is a table")
    for key, value in table.items():
        if isinstance(value, dict):
            raise OptionError(
                f"--list: {path}: {key} is a table; options are written as "
                f'options = {{ "{key}.OPTION" = VALUE }}'
            )
    flags = {key.replace("-", "_"): value for key, value in table.items()}
    return Entry(name, method, flags, _flat(options))


def _flat(options: Mapping[str, Any], within: str = "") -> dict[str, object]:
    """Return nested tables, which dotted keys make, as options with dots in their names."""
    found: dict[str, object] = {}
    for key, value in options.items():
        found |= (
            _flat(value, f"{within}{key}.") if isinstance(value, dict) else {within + key: value}
        )
    return found


def cells_of(
    methods: Sequence[str],
    axes: Sequence[Axis],
    flags: Mapping[str, Any],
    options: Mapping[str, object],
    entries: Sequence[Entry] = (),
) -> list[Cell]:
    """Return a cell for every combination of methods, entries and values of the axes.

    `flags` and `options` are those of all cells; an entry's replace them, and an axis' replace
    these. An entry with a method of its own is not combined with `methods`. Raises `OptionError`.
    """
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise OptionError(f"--grid: {key} is given twice; give all its values at once")
    for method in methods:
        if methods.count(method) > 1:
            raise OptionError(f"{method} is given twice; name each method once")
    chosen = [
        (_stem(entry, method, number if len(entries) > 1 else 0, len(methods)), entry, method)
        for number, entry in enumerate(entries or [Entry()], 1)
        for method in ([entry.method] if entry.method else methods)
    ]
    if not chosen:
        raise OptionError("no method is given; name one or several, for example bpfed,fedavg")
    points = list(product(*(axis.values for axis in axes)))
    named = []
    for stem, entry, method in chosen:
        for point in points:
            at = dict(zip(keys, map(value_text, point), strict=True))
            words = [stem, *(f"{key}={text}" for key, text in at.items())]
            own, of_parts = _settings(entry, list(zip(axes, point, strict=True)))
            parts = method, {**flags, **own}, {**options, **of_parts}
            named.append((",".join(words), parts, at, stem))
    folders = [_folder(words) for words, *_ in named]
    return [
        Cell(
            folder if folders.count(folder) == 1 else f"{folder}-{_digest(words)}",
            *parts,
            point=at,
            stem=stem,
        )
        for (words, parts, at, stem), folder in zip(named, folders, strict=True)
    ]


def _stem(entry: Entry, method: str, number: int, methods: int) -> str:
    """Return the first part of a cell's name: its entry's name, or the method and a number."""
    short = Path(method).stem if method.endswith(".toml") else method
    if entry.name:
        return entry.name if entry.method or methods == 1 else f"{short},{entry.name}"
    return f"{short},{number}" if number else short


def _settings(
    entry: Entry, point: Sequence[tuple[Axis, Any]]
) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the flags and options of an entry at a point."""
    flags, options = dict(entry.flags), dict(entry.options)
    for axis, value in point:
        (options if axis.of_part else flags)[axis.key] = value
    return flags, options


def _folder(words: str) -> str:
    """Return a name that a folder can have on every system."""
    plain = re.sub(r"[^A-Za-z0-9._=,+-]", "-", words).lstrip("._=,+-") or "cell"
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}-{_digest(words)}"


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:8]
