"""The schema of a table: which columns there are, of which kind, and how they become features.

A schema is what the owners of a federation agree on before they train: names of columns and of
categories. Every number, such as a mean or how often a category occurs, is learnt from sums over
clients (`bflcore.problem.scaling.Scaling`); until then missing numbers stay NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs

from bflcore.data.tables import TRUTH, Table, is_date, missing, numbers, texts
from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["NUMBER", "Column", "Schema"]

NUMBER, CATEGORY, UNUSED = "number", "category", "unused"
UNSEEN = -1.0  # code of a category that no training sample has
# More categories than this, in more than half of the rows, are names of samples.
CATEGORIES = 10
ID = re.compile(r"(^|[_ ])(id|index|unnamed)$", re.IGNORECASE)


@attrs.frozen
class Column:
    """One column: a number, a category, or unused because it is empty in the training samples.

    A number is one feature, a category one per name in `categories`, apart from the `reference` if
    there is one, to which the others are compared. If the value is `missing` in a training sample,
    a further feature is 1 where it is missing, else 0.
    """

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    missing: bool = False
    reference: str = ""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        number = [self.name] if self.kind == NUMBER else []
        named = (name for name in self.categories if name != self.reference)
        values = [*number, *(f"{self.name}={category}" for category in named)]
        return (*values, f"{self.name} is missing") if self.missing else tuple(values)

    def codes(self, table: Table) -> Any:
        """Return the values ``[N]`` of this column as numbers: codes of categories; NaN: missing.

        Raises `DataError` if a number is expected and there is something else.
        """
        values = _vector(table, self.name)
        gaps = missing(values)
        if self.kind == UNUSED:
            return np.full(len(values), np.nan)
        if self.kind == NUMBER:
            found = numbers(values, gaps)
            if found is None:
                raise _not_a_number(table, self.name, values, gaps)
            if np.isinf(found).any():
                raise DataError(f"{table.name}: column {self.name} has infinity; remove it")
            return found
        number = {name: float(code) for code, name in enumerate(self.categories)}
        found = np.array([number.get(text, UNSEEN) for text in texts(values, gaps)])
        found[gaps] = np.nan
        return found

    def encode(self, codes: Any) -> Any:
        """Return the features ``[N, features]`` of `codes` ``[N]``."""
        parts = [codes[:, None]] if self.kind == NUMBER else []
        if self.kind == CATEGORY:
            named = [c for c, name in enumerate(self.categories) if name != self.reference]
            parts.append(codes[:, None] == np.array(named, int))
        if self.missing:
            parts.append(np.isnan(codes)[:, None])
        return np.concatenate([np.zeros((len(codes), 0)), *parts], 1)

    def with_reference(self) -> Column:
        """Return the column with its first category as the reference; a number as it is."""
        return attrs.evolve(self, reference=next(iter(self.categories), ""))

    def of_training(self, codes: Any) -> tuple[Column, Any]:
        """Return the column as training samples `codes` ``[n]`` show it, and its old codes."""
        gaps = np.isnan(codes)
        if gaps.all():
            return attrs.evolve(self, kind=UNUSED, categories=()), np.zeros(0)
        used = np.unique(codes[~gaps]) if self.kind == CATEGORY else np.zeros(0)
        names = tuple(self.categories[int(code)] for code in used)
        return attrs.evolve(self, categories=names, missing=bool(gaps.any())), used


@attrs.frozen
class Schema:
    """The columns of a table that become features, in order; the others are not looked at.

    `target` is the column to predict, if the features come from a table with names; `beside` are
    the owners and what the user left out.
    """

    columns: tuple[Column, ...]
    target: str = ""
    beside: tuple[str, ...] = ()

    @classmethod
    def infer(
        cls, table: Table, target: str, beside: Sequence[str]
    ) -> tuple[Self, tuple[str, ...]]:
        """Return the schema of a table, and what its user should look at.

        Raises `DataError` for dates, for columns that name the samples, and without a column.
        """
        others = (target, *beside)
        names = [name for name in table.columns if name not in others]
        if not names:
            raise DataError(f"{table.name} has no column besides {', '.join(others)}")
        found = [_inferred(table, name) for name in names]
        ids = [column.name for column in found if _counts_samples(column, table)]
        notes = [
            f"column {name} has a different whole number in each row, like an id; to leave it out: "
            f"--drop {name}"
            for name in ids
        ]
        return cls(tuple(found), target, tuple(beside)), tuple(notes)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features ``[F]``."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def indicators(self) -> tuple[bool, ...]:
        """Which features ``[F]`` are 0 or 1, rather than a number to be scaled."""
        return tuple(
            not (column.kind == NUMBER and place == 0)
            for column in self.columns
            for place in range(len(column.features))
        )

    def codes(self, table: Table) -> Any:
        """Return ``[N, columns]``: numbers, and codes of categories; NaN: missing."""
        return np.stack([column.codes(table) for column in self.columns], 1)

    def encode(self, codes: Any) -> Any:
        """Return the features ``[N, F]`` float32 of `codes` ``[N, columns]``."""
        pairs = zip(self.columns, codes.T, strict=True)
        return np.concatenate([column.encode(one) for column, one in pairs], 1, dtype=np.float32)

    def of_training(self, codes: Any, rows: Any, *others: Any) -> tuple[Schema, list[Any]]:
        """Return the schema of the training samples `rows`, and all samples' codes in its terms.

        `codes` and `others` ``[N, columns]`` are codes of this schema. A category of no training
        sample is unseen.
        """
        found = [
            column.of_training(one) for column, one in zip(self.columns, codes[rows].T, strict=True)
        ]
        again = [given.copy() for given in (codes, *others)]
        for given in again:
            for place, (column, used) in enumerate(found):
                if column.kind == CATEGORY:
                    given[:, place] = _recoded(given[:, place], used)
        return attrs.evolve(self, columns=tuple(column for column, _ in found)), again

    def read(self, table: Table) -> tuple[Any, tuple[str, ...]]:
        """Return the features ``[N, F]`` of new samples, and what was ignored in them.

        Columns are found by name. Raises `DataError` if one is missing.
        """
        needed = [column for column in self.columns if column.kind != UNUSED]
        if absent := [c.name for c in needed if c.name not in table.columns]:
            raise DataError(
                f"{table.name} has no column {absent[0]!r}; the model needs "
                f"{', '.join(column.name for column in needed)}"
            )
        read = attrs.evolve(self, columns=tuple(needed))
        codes = read.codes(table)
        known = {*(column.name for column in self.columns), self.target, *self.beside}
        extra = [name for name in table.columns if name not in known]
        notes = [f"columns that the model does not know are ignored: {', '.join(extra)}"]
        notes = notes if extra else []
        for column, one in zip(needed, codes.T, strict=True):
            if (strange := one == UNSEEN).any():
                values = _vector(table, column.name)[strange]
                names = sorted(set(texts(values, np.zeros(len(values), bool))))
                count = f"as {column.reference}" if column.reference else "as none of the known"
                notes.append(
                    f"column {column.name}: no training sample has {', '.join(names[:5])}"
                    f"{', ...' if len(names) > 5 else ''}; such values count {count}"
                )
        return read.encode(codes), tuple(notes)

    def read_numbers(self, values: Any) -> Any:
        """Return the features ``[N, F]`` of samples ``[N, columns]`` given by position.

        Raises `DataError` if a column is not a number.
        """
        for column in self.columns:
            if column.kind == CATEGORY:
                raise DataError(
                    f"x is an array, but column {column.name} is a category; give a table with "
                    "names: a data frame, or a list of dicts"
                )
        return self.encode(np.asarray(values, np.float64))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a schema from the plain values of `attrs.asdict`."""
        columns = [
            Column(**column | {"categories": tuple(column["categories"])})
            for column in values["columns"]
        ]
        return cls(tuple(columns), values["target"], tuple(values["beside"]))


def _inferred(table: Table, name: str) -> Column:
    values = _vector(table, name)
    gaps = missing(values)
    if is_date(values, gaps):
        example = values[~gaps][:1]
        raise DataError(
            f"{table.name}: column {name} holds dates{f' ({example[0]})' if len(example) else ''}; "
            "give a number, such as the days since an event, or leave it out: "
            f"--drop {name}"
        )
    if gaps.all() or numbers(values, gaps) is not None:
        return Column(name, NUMBER)
    names = sorted({text for text, gap in zip(texts(values, gaps), gaps, strict=True) if not gap})
    count = int((~gaps).sum())
    if len(names) > max(CATEGORIES, count / 2):
        typo = _not_a_number(table, name, values, gaps) if _mostly_numbers(names) else None
        raise typo or DataError(
            f"{table.name}: column {name} has {len(names)} different texts in {count} rows, like "
            f"an id or free text; leave it out: --drop {name}"
        )
    return Column(name, CATEGORY, tuple(names))


def _vector(table: Table, name: str) -> Any:
    values = table.columns[name]
    if values.ndim != 1:
        raise DataError(
            f"{table.name}: column {name} has shape {list(values.shape)}; allowed: one value per "
            "sample; give arrays as x and y"
        )
    return values


def _not_a_number(table: Table, name: str, values: Any, gaps: Any) -> DataError:
    for row, text in enumerate(texts(values, gaps)):
        if not gaps[row] and not _parses(text):
            break
    return DataError(
        f"{table.name}: column {name} has {text!r} in row {row + 1}, which is not a number; "
        "correct it, or leave the field empty if it is missing"
    )


def _mostly_numbers(names: Sequence[str]) -> bool:
    return sum(map(_parses, names)) > len(names) / 2


def _parses(text: str) -> bool:
    if text.lower() in TRUTH:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def _counts_samples(column: Column, table: Table) -> bool:
    """Return whether a column holds a whole number of its own per sample, and is called an id."""
    if column.kind != NUMBER or not ID.search(column.name) or len(table) < CATEGORIES:
        return False
    codes = column.codes(table)
    return len(np.unique(codes)) == len(codes) and bool((codes == np.floor(codes)).all())


def _recoded(codes: Any, used: Any) -> Any:
    """Replace codes ``[N]`` by their places in `used`; others become unseen, NaN stays."""
    places = np.searchsorted(used, codes).clip(0, len(used) - 1)
    found = np.where(used[places] == codes, places, UNSEEN)
    return np.where(np.isnan(codes), np.nan, found)
