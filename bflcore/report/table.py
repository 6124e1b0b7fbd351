"""The table of `bfl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bflcore.report.reading import Run, read_run

__all__ = ["compare_runs", "grid", "print_table", "row_of"]

WIDE = 10_000  # characters, more than any line has
# Column -> (metric, mean or std over clients or pooled over samples, format)
CLASSIFICATION = {
    "accuracy": ("personal.accuracy", "mean", "{:.4f}"),
    "std": ("personal.accuracy", "std", "{:.4f}"),
    "ECE": ("personal.ece", "pooled", "{:.4f}"),
    "NLL": ("personal.nll", "pooled", "{:.4f}"),
    "Brier": ("personal.brier", "pooled", "{:.4f}"),
    "global accuracy": ("global.accuracy", "pooled", "{:.4f}"),
    "novel accuracy": ("novel.accuracy", "mean", "{:.4f}"),
    "validation accuracy": ("validation.accuracy", "mean", "{:.4f}"),
    "validation NLL": ("validation.nll", "pooled", "{:.4f}"),
}
REGRESSION = {
    "RMSE": ("personal.rmse", "mean", "{:.4f}"),
    "NMSE": ("personal.nmse", "pooled", "{:.4f}"),
    "NLL": ("personal.nll", "pooled", "{:.4f}"),
    "coverage 90": ("personal.coverage90", "pooled", "{:.3f}"),
    "novel RMSE": ("novel.rmse", "mean", "{:.4f}"),
    "validation RMSE": ("validation.rmse", "mean", "{:.4f}"),
    "validation NLL": ("validation.nll", "pooled", "{:.4f}"),
}


def row_of(run: Run) -> dict[str, Any]:
    """Return one run's final metrics, unrounded; None for those that it does not have."""
    summary, columns = run.summary, CLASSIFICATION if run.classifies else REGRESSION
    metrics = {
        column: summary["final"].get(key, {}).get(statistic)
        for column, (key, statistic, _) in columns.items()
    }
    return {
        "run": run.label,
        "method": summary["method"],
        "rounds": summary["rounds"],
        **metrics,
        "seconds": summary["seconds"]["total"],
        "MB up": summary["bytes"]["up"] / 1e6,
        "MB down": summary["bytes"]["down"] / 1e6,
    }


def compare_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row per run. Raises `RunError` for a folder that is not a finished run."""
    return [row_of(read_run(path)) for path in paths]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows, one per line; columns that are empty throughout are left out.

    On a terminal the table fits its width; elsewhere every line is complete.
    """
    columns, cells = grid(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_text = name in {"run", "method"}
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def grid(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and formatted cells; columns that are empty throughout are left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) is not None for row in rows)]
    return columns, [[_format(name, row.get(name)) for name in columns] for row in rows]


def _format(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    _, _, style = (CLASSIFICATION | REGRESSION).get(name, ("", "", "{:.1f}"))
    return style.format(value)
