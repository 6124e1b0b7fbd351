"""Loggers: where evaluated rounds go besides ``metrics.jsonl``."""

from __future__ import annotations

import abc
import csv
from pathlib import Path
from typing import Any, ClassVar

from bflcore.options import Component, component

__all__ = ["CSV", "Logger", "flat"]


class Logger(Component, abc.ABC):
    """Base of loggers that ``--log NAME`` finds."""

    kind: ClassVar[str] = "logger"

    @abc.abstractmethod
    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Log one evaluated round (a line of ``metrics.jsonl``) of the run in `folder`."""


@component
class CSV(Logger):
    """Add each evaluated round to ``metrics.csv``: one column a figure, for spreadsheets."""

    name = "csv"

    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Add one row; a figure that earlier rounds lack gets a column, empty in theirs."""
        path = folder / "metrics.csv"
        rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        rows.append(flat(record))
        columns = dict.fromkeys(name for row in rows for name in row)
        aside = folder / ".metrics.csv.writing"
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)
        aside.replace(path)


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Return a record's numbers under dotted names: ``personal.accuracy.mean``."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            numbers |= {f"{key}.{name}": number for name, number in flat(value).items()}
        elif isinstance(value, int | float):
            numbers[key] = value
    return numbers
