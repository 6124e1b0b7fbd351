"""Cells of a study: settings that are run once per seed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bflcore.data.user import MEMORY
from bflcore.errors import OptionError
from bflcore.options.text import value_text

__all__ = ["Cell", "check_cells", "seeds_of"]

FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,149}")
SEEDS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
MOST_SEEDS = 10_000
RESERVED = {"seed": "the seeds of the study", "out": "the folder of the study"}


def _check_name(_cell: Cell, _: object, name: str) -> None:
    if not FOLDER.fullmatch(name):
        raise OptionError(
            f"cell {name!r}: its name is a folder's; allowed: at most 150 letters, digits and "
            "._=,+- that begin with a letter or a digit"
        )


def _check_flags(cell: Cell, _: object, flags: Mapping[str, Any]) -> None:
    for name, instead in RESERVED.items():
        if name in flags:
            raise OptionError(f"cell {cell.name}: {name} is not a setting of a cell, but {instead}")


@attrs.frozen
class Cell:
    """Settings that are run once per seed, in a folder called `name`.

    `method`, `flags` and `options` are the arguments of `bflcore.run`. `point` has the values, as
    text, by which the cell differs from the others of a grid; `stem` names what it has in common
    with those that differ from it on the grid's axes alone.
    """

    name: str = attrs.field(validator=_check_name)
    method: str
    flags: Mapping[str, Any] = attrs.field(factory=dict, validator=_check_flags)
    options: Mapping[str, object] = attrs.field(factory=dict)
    point: Mapping[str, str] = attrs.field(factory=dict)
    stem: str = ""

    def command(self, seed: int) -> str:
        """Return the ``bfl run`` line that repeats the run with a seed."""
        words = ["bfl", "run", self.method]
        for name, value in self.flags.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value is not None and value is not False:
                words += [flag, _text(value)]
        for name, value in self.options.items():
            words += ["-o", f"{name}={value_text(value)}"]
        return shlex.join([*words, "--seed", str(seed)])

    def as_json(self) -> dict[str, Any]:
        """Return plain values; data that Python holds are only named."""
        return {
            "name": self.name,
            "method": self.method,
            "flags": {name: _plain(value) for name, value in self.flags.items()},
            "options": {name: _plain(value) for name, value in self.options.items()},
            **({"point": dict(self.point)} if self.point else {}),
            **({"stem": self.stem} if self.stem else {}),
        }


def _text(value: object) -> str:
    return value_text(_plain(value))


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list) and all(map(_is_plain, value)):
        return list(value)
    return value if _is_plain(value) else MEMORY


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise `OptionError` unless there are cells and their names make different folders."""
    if not cells:
        raise OptionError("there is no cell to run; give a method")
    known = set[str]()
    for cell in cells:
        folder = cell.name.lower()  # some systems ignore case
        if folder in known:
            raise OptionError(f"two cells are called {cell.name}; give them different names")
        known.add(folder)


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds that a text lists: ``0-4``, ``0,2,5-7``. Raises `OptionError`."""
    seeds: list[int] = []
    for word in text.split(","):
        found = SEEDS.fullmatch(word.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise OptionError(
                f"--seeds: {word.strip()!r} is not allowed; allowed: numbers and ranges of them, "
                "for example 0-4 or 0,2,5-7"
            )
        if last - first >= MOST_SEEDS:
            raise OptionError(f"--seeds: {text} are too many; allowed: at most {MOST_SEEDS:,}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise OptionError(f"--seeds: {text} names {twice} twice; name each seed once")
    return tuple(seeds)
