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
    """Append each evaluated round to ``metrics.csv``: one column a figure, for spreadsheets."""

    name = "csv"

    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Append one row; the first one writes the header."""
        path = folder / "metrics.csv"
        row = flat(record)
        first = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if first:
                writer.writerow(row)
            writer.writerow(row.values())


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Return a record's numbers under dotted names: ``personal.accuracy.mean``."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            numbers |= {f"{key}.{name}": number for name, number in flat(value).items()}
        elif isinstance(value, int | float):
            numbers[key] = value
    return numbers
