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
from typing import Any, TypeVar, cast

import attrs

from bflcore.errors import OptionError, unknown

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
OF_TABLE = ("title", "source", "notes", "protocol", "against")
TABLE_KEYS = (*OF_TABLE, "metrics", "columns", "rows", "claims", *SHARED)

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
    statistic: str = "mean"  # over clients: mean or std; over all samples: pooled
    scale: float = 100.0
    better: str = "higher"  # or lower, or neither
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
    protocol_name = values.pop("protocol", "")
    if protocol_name:
        shared = _load(path.parent / "protocols" / f"{protocol_name}.toml")
        protocol = _protocol(protocol_name, shared, f"{where}: protocol {protocol_name}")
    else:
        shared = {key: values.pop(key) for key in SHARED if key in values}
        protocol = _protocol(path.stem, {"title": values.get("title", ""), **shared}, where)
    metrics = {
        key: _build(Metric, {**of, "range": tuple(of.get("range", (0.0, 100.0)))}, where)
        for key, of in values.pop("metrics", {}).items()
    }
    columns = tuple(_column(one, protocol, metrics, where) for one in values.pop("columns", ()))
    rows = tuple(_row(one, protocol, columns, where) for one in values.pop("rows", ()))
    claims = tuple(_claim(one, rows, columns, where) for one in values.pop("claims", ()))
    values["notes"] = tuple(values.get("notes", ()))
    found = {"name": path.stem, "given": where, "protocol": protocol, "columns": columns}
    return _build(Table, {**values, **found, "rows": rows, "claims": claims}, where)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"{path} does not exist; give a table or a file .toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{path} cannot be read as TOML ({error}); correct the file") from None


def _build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a class of this module. Raises `OptionError` for unknown and missing keys."""
    fields = {field.name: field for field in attrs.fields(cast("Any", cls))}
    for key in values:
        if key not in fields:
            raise unknown(f"key of a {cls.__name__.lower()} in {where}", key, fields)
    for key, field in fields.items():
        if field.default is attrs.NOTHING and key not in values:
            raise OptionError(f"{where}: a {cls.__name__.lower()} lacks the key {key}; add it")
    return cls(**values)


def _protocol(name: str, values: dict[str, Any], where: str) -> Protocol:
    settings = {
        key: _setting(key, of, f"{where}: setting {key}")
        for key, of in values.pop("settings", {}).items()
    }
    recipes = {
        key: _build(
            Recipe, {**of, "name": key, "without": tuple(of.get("without", ()))}, f"{where}: {key}"
        )
        for key, of in values.pop("recipes", {}).items()
    }
    parts: dict[str, Any] = {"name": name, "settings": settings, "recipes": recipes}
    if "rounds" in values:
        parts["rounds"] = _build(Rounds, values.pop("rounds"), where)
    parts["differs"] = tuple(values.pop("differs", ()))
    return _build(Protocol, {**values, **parts}, where)


def _setting(name: str, values: dict[str, Any], where: str) -> Setting:
    parts: dict[str, Any] = {"name": name}
    if "stand_in" in values:
        parts["stand_in"] = _build(StandIn, values["stand_in"], where)
    if isinstance(values.get("rounds"), dict):
        parts["rounds"] = _build(Rounds, values["rounds"], where)
    return _build(Setting, {**values, **parts}, where)


def _column(
    values: dict[str, Any], protocol: Protocol, metrics: Mapping[str, Metric], where: str
) -> Column:
    name = values.get("name", "")
    setting = values.get("setting", name)
    metric = values.get("metric", next(iter(metrics), ""))
    for kind, one, known in (
        ("setting", setting, protocol.settings),
        ("metric", metric, metrics),
    ):
        if one not in known:
            raise unknown(f"{kind} of column {name} in {where}", one, known)
    parts = {"name": name, "setting": protocol.settings[setting], "metric": metrics[metric]}
    return _build(Column, {**values, **parts}, f"{where}: column {name}")


def _row(
    values: dict[str, Any], protocol: Protocol, columns: tuple[Column, ...], where: str
) -> Row:
    name = values.get("name", "")
    recipe = values.get("recipe", name)
    if recipe not in protocol.recipes:
        raise unknown(f"recipe of row {name} in {where}", recipe, protocol.recipes)
    printed = values.get("paper", [])
    if printed and len(printed) != len(columns):
        raise OptionError(
            f"{where}: row {name} has {len(printed)} numbers for {len(columns)} columns; give one "
            f'per column, or "{NOT_LEGIBLE}" for a cell that is not legible'
        )
    paper = {}
    for column, number in zip(columns, printed, strict=False):
        if number != NOT_LEGIBLE and not isinstance(number, int | float):
            raise OptionError(
                f"{where}: row {name}, column {column.name}: {number!r} is not allowed; allowed: a "
                f'number, or "{NOT_LEGIBLE}"'
            )
        paper[column.name] = None if number == NOT_LEGIBLE else float(number)
    parts = {"name": name, "recipe": protocol.recipes[recipe], "paper": paper}
    listed = tuple(values.get("columns", ("*",)))
    return _build(Row, {**values, **parts, "columns": listed}, f"{where}: row {name}")


def _claim(
    values: dict[str, Any], rows: tuple[Row, ...], columns: tuple[Column, ...], where: str
) -> Claim:
    claim = _build(
        Claim,
        {
            **values,
            "rows": tuple(values.get("rows", ())),
            "than_rows": tuple(values.get("than_rows", ())),
            "than_column": values.get("than_column", values.get("column", "")),
        },
        f"{where}: claim",
    )
    for kind, named, known in (
        ("row", (*claim.rows, *claim.than_rows), [row.name for row in rows]),
        ("column", (claim.column, claim.than_column), [column.name for column in columns]),
    ):
        for one in named:
            if one not in known:
                raise unknown(f"{kind} of a claim in {where}", one, known)
    return claim
