"""The papers' tables as data: what was printed, and how each cell is run here.

A table is a TOML file. Its protocol, in ``protocols/`` beside it or in the table itself, says what
several tables have in common: `settings` (data and split) and `recipes` (methods with options).

    title, source, notes            what the table is, which paper printed it, remarks on it
    protocol                        name of a protocol, or else the table has its keys
    against                         another table of the same rows and columns, shown beside it
    [metrics.NAME]                  key, statistic, scale, title, better, places, margin, range
    [[columns]]                     name, setting, metric
    [[rows]]                        name, recipe, paper = [a number or "n/a" per column], notes,
                                    columns (patterns; without them, all)
    [[claims]]                      text, above or alike: see `Claim`

    title, seeds, rounds = { paper, here }, flags, options, differs     of a protocol
    [settings.NAME]                 flags, options, rounds, says,
                                    stand_in = { flags, options, says, comparable }
    [recipes.NAME]                  method, flags, options, rounds, differs, without
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from bflcore.errors import OptionError, unknown
from bflcore.studies.typed import build, tables, tables_by_name

__all__ = [
    "Claim",
    "Column",
    "Metric",
    "Protocol",
    "Recipe",
    "Rounds",
    "Row",
    "Setting",
    "StandIn",
    "Table",
    "matches",
    "read_table",
    "table_names",
]

PAPERS = Path(__file__).with_name("papers")
NOT_LEGIBLE = "n/a"  # a cell that cannot be read in the source
SHARED = ("seeds", "rounds", "flags", "options", "differs", "settings", "recipes")
OF_TABLE = ("title", "source", "notes", "against")
TABLE_KEYS = (*OF_TABLE, "protocol", "metrics", "columns", "rows", "claims", *SHARED)

T = TypeVar("T")
Values = Mapping[str, Any]


@attrs.frozen
class Rounds:
    """Rounds of the paper, and of the shorter runs here that were chosen for time."""

    paper: int
    here: int


@attrs.frozen
class Metric:
    """What a column shows: a metric of the last round, in the paper's unit."""

    key: str  # of ``summary.json``: personal.accuracy
    title: str
    # Over clients: mean or std; over all samples: pooled.
    statistic: Literal["mean", "std", "pooled"] = "mean"
    scale: float = 100.0
    better: Literal["higher", "lower", "neither"] = "higher"
    places: int = 2
    margin: float = 1.0  # a difference to the paper that needs no reason
    range: tuple[float, float] = (0.0, 100.0)


@attrs.frozen
class StandIn:
    """Data of which everybody has a copy, in place of data that are not here.

    Unless they are `comparable`, nothing is compared with the printed numbers, only claims are
    checked.
    """

    says: str
    comparable: bool = True
    flags: Values = attrs.field(factory=dict)
    options: Values = attrs.field(factory=dict)


@attrs.frozen
class Setting:
    """Data, their division among clients, and what else differs between columns."""

    name: str
    flags: Values = attrs.field(factory=dict)
    options: Values = attrs.field(factory=dict)
    rounds: Rounds | int | None = None
    stand_in: StandIn | None = None
    says: str = ""


@attrs.frozen
class Recipe:
    """A method as it is run here, and what departs from the paper."""

    name: str
    method: str
    flags: Values = attrs.field(factory=dict)
    options: Values = attrs.field(factory=dict)
    rounds: int | None = None
    differs: str = ""
    without: tuple[str, ...] = ()  # options of the protocol that the method does not have


@attrs.frozen
class Protocol:
    """What several tables have in common."""

    name: str
    title: str
    seeds: str
    rounds: Rounds
    settings: Mapping[str, Setting]
    recipes: Mapping[str, Recipe]
    flags: Values = attrs.field(factory=dict)
    options: Values = attrs.field(factory=dict)
    differs: tuple[str, ...] = ()


@attrs.frozen
class Column:
    """A column: a setting, and the metric that is shown of its runs."""

    name: str
    setting: Setting
    metric: Metric


@attrs.frozen
class Row:
    """A row: a recipe, and what the paper prints for it per column (None = not legible)."""

    name: str
    recipe: Recipe
    paper: Mapping[str, float | None] = attrs.field(factory=dict)
    notes: Mapping[str, str] = attrs.field(factory=dict)  # by column, or * for all
    columns: tuple[str, ...] = ("*",)

    def note(self, column: str) -> str:
        """Return the reason why the row differs from the paper in a column."""
        return self.notes.get(column, self.notes.get("*", ""))


@attrs.frozen
class Claim:
    """What the paper says of its rows, checked seed by seed.

    The mean of `rows` in `column` is better than that of `than_rows` in `than_column`; or, if
    `alike`, differs from it by at most `within`. Without `than_rows`, each row is compared with
    itself in the other column.
    """

    text: str
    column: str
    rows: tuple[str, ...]
    than_rows: tuple[str, ...] = ()
    than_column: str = ""
    alike: bool = False
    within: float = 0.0


@attrs.frozen
class Table:
    """A table of a paper with everything that it takes to run its cells.

    `given` is what ``bfl reproduce`` calls it: its name, or the path of a file.
    """

    name: str
    title: str
    source: str
    protocol: Protocol
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    against: str = ""
    given: str = ""

    def row(self, name: str) -> Row:
        """Return a row by its name."""
        return next(row for row in self.rows if row.name == name)

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return next(column for column in self.columns if column.name == name)

    def cells(self, only: Sequence[str] = ()) -> list[tuple[Row, Column]]:
        """Return the cells that exist and are selected by patterns of rows and columns.

        Patterns of rows select among rows, those of columns among columns. Raises `OptionError` for
        a pattern that matches neither.
        """
        rows, columns = [r.name for r in self.rows], [c.name for c in self.columns]
        wanted_rows, wanted_columns = set[str](), set[str]()
        for pattern in only:
            found = matches(pattern, rows), matches(pattern, columns)
            if not any(found):
                raise unknown("row or column in --only", pattern, [*rows, *columns])
            wanted_rows |= found[0]
            # An exact row such as fedsi is not also the beginning of a column.
            wanted_columns |= found[1] if pattern not in rows else set()
        return [
            (row, column)
            for row in self.rows
            for column in self.columns
            if any(fnmatchcase(column.name, pattern) for pattern in row.columns)
            and row.name in (wanted_rows or rows)
            and column.name in (wanted_columns or columns)
        ]


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """Return the names that a pattern selects: itself, a glob, or the beginning of a name.

    ``fedsi`` selects the name fedsi alone if there is one, ``fashion-mnist`` selects
    fashion-mnist-small and fashion-mnist-large.
    """
    found = set(names)
    if pattern in found:
        return {pattern}
    globs = {name for name in found if fnmatchcase(name, pattern)}
    return globs or {name for name in found if name.startswith((f"{pattern}-", f"{pattern} "))}


def table_names() -> list[str]:
    """Return the names of the tables that are installed."""
    return sorted(path.name.removesuffix(".toml") for path in PAPERS.glob("*.toml"))


def read_table(name: str | Path) -> Table:
    """Read an installed table, or one in a file ``.toml``.

    Raises `OptionError` for an unknown name, and for a file that is not a table.
    """
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in table_names():
            raise unknown("table", str(name), table_names(), "or give a file .toml")
        path = PAPERS / f"{name}.toml"
    values = _load(path)
    where = str(path if Path(name).suffix == ".toml" else name)
    for key in values:
        if key not in TABLE_KEYS:
            raise unknown(f"key of {where}", key, TABLE_KEYS)
    protocol = _protocol_of(path, values, where)
    metrics = {
        key: build(Metric, of, f"{where}: metric {key}")
        for key, of in tables_by_name(values, "metrics", where).items()
    }
    columns = tuple(
        _column(one, protocol, metrics, where) for one in tables(values, "columns", where)
    )
    rows = tuple(_row(one, protocol, columns, where) for one in tables(values, "rows", where))
    claims = tuple(_claim(one, rows, columns, where) for one in tables(values, "claims", where))
    found = {"name": path.stem, "given": where, "protocol": protocol, "columns": columns}
    own = {key: values[key] for key in OF_TABLE if key in values}
    return build(Table, {**own, **found, "rows": rows, "claims": claims}, where)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"{path} does not exist; give a table or a file .toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{path} cannot be read as TOML ({error}); correct the file") from None


def _protocol_of(path: Path, values: Mapping[str, Any], where: str) -> Protocol:
    """Return the protocol that a table names, or that the table itself has the keys of."""
    if name := values.get("protocol"):
        shared = _load(path.parent / "protocols" / f"{name}.toml")
        return _protocol(str(name), shared, f"{where}: protocol {name}")
    shared = {key: values[key] for key in SHARED if key in values}
    return _protocol(path.stem, {"title": values.get("title", ""), **shared}, where)


def _protocol(name: str, values: Mapping[str, Any], where: str) -> Protocol:
    settings = {
        key: build(Setting, {**of, "name": key}, f"{where}: setting {key}")
        for key, of in tables_by_name(values, "settings", where).items()
    }
    recipes = {
        key: build(Recipe, {**of, "name": key}, f"{where}: {key}")
        for key, of in tables_by_name(values, "recipes", where).items()
    }
    parts = {"name": name, "settings": settings, "recipes": recipes}
    return build(Protocol, {**values, **parts}, where)


def _column(
    values: Mapping[str, Any], protocol: Protocol, metrics: Mapping[str, Metric], where: str
) -> Column:
    name = values.get("name", "")
    setting = values.get("setting", name)
    metric = values.get("metric", next(iter(metrics), ""))
    parts = {
        "name": name,
        "setting": _named(setting, protocol.settings, f"setting of column {name} in {where}"),
        "metric": _named(metric, metrics, f"metric of column {name} in {where}"),
    }
    return build(Column, {**values, **parts}, f"{where}: column {name}")


def _named(name: object, known: Mapping[str, T], what: str) -> T:
    """Return what a name stands for. Raises `OptionError` for an unknown one."""
    if not isinstance(name, str) or name not in known:
        raise unknown(what, str(name), known)
    return known[name]


def _row(
    values: Mapping[str, Any], protocol: Protocol, columns: tuple[Column, ...], where: str
) -> Row:
    name = values.get("name", "")
    recipe = _named(
        values.get("recipe", name), protocol.recipes, f"recipe of row {name} in {where}"
    )
    parts = {"name": name, "recipe": recipe, "paper": {}}
    row = build(Row, {**values, **parts}, f"{where}: row {name}")
    return attrs.evolve(row, paper=_printed(values.get("paper", []), row.name, columns, where))


def _printed(
    numbers: object, row: str, columns: tuple[Column, ...], where: str
) -> dict[str, float | None]:
    """Return what the paper prints in a row, by column."""
    if not isinstance(numbers, list) or (numbers and len(numbers) != len(columns)):
        given = f"{len(numbers)} numbers" if isinstance(numbers, list) else repr(numbers)
        raise OptionError(
            f"{where}: row {row} has {given} for {len(columns)} columns; give one "
            f'per column, or "{NOT_LEGIBLE}" for a cell that is not legible'
        )
    paper: dict[str, float | None] = {}
    for column, number in zip(columns, numbers, strict=False):
        if number != NOT_LEGIBLE and not isinstance(number, int | float):
            raise OptionError(
                f"{where}: row {row}, column {column.name}: {number!r} is not allowed; allowed: a "
                f'number, or "{NOT_LEGIBLE}"'
            )
        paper[column.name] = None if number == NOT_LEGIBLE else float(number)
    return paper


def _claim(
    values: Mapping[str, Any], rows: tuple[Row, ...], columns: tuple[Column, ...], where: str
) -> Claim:
    other = values.get("than_column", values.get("column", ""))
    claim = build(Claim, {**values, "than_column": other}, f"{where}: claim")
    for kind, named, known in (
        ("row", (*claim.rows, *claim.than_rows), [row.name for row in rows]),
        ("column", (claim.column, claim.than_column), [column.name for column in columns]),
    ):
        for one in named:
            if one not in known:
                raise unknown(f"{kind} of a claim in {where}", one, known)
    return claim
