"""The table of `bfl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.report.reading import read_run

if TYPE_CHECKING:
    from bflcore.report.reading import Run

__all__ = ["compare_table", "render_table", "row_of"]

# Column -> (metric key, which of its figures, format)
CLASSIFICATION = {
    "accuracy": ("personal.accuracy", "mean", "{:.4f}"),
    "std": ("personal.accuracy", "std", "{:.4f}"),
    "ECE": ("personal.ece", "pooled", "{:.4f}"),
    "NLL": ("personal.nll", "pooled", "{:.4f}"),
    "Brier": ("personal.brier", "pooled", "{:.4f}"),
    "global accuracy": ("global.accuracy", "pooled", "{:.4f}"),
    "novel accuracy": ("novel.accuracy", "mean", "{:.4f}"),
}
REGRESSION = {
    "RMSE": ("personal.rmse", "mean", "{:.4f}"),
    "NMSE": ("personal.nmse", "pooled", "{:.4f}"),
    "NLL": ("personal.nll", "pooled", "{:.4f}"),
    "coverage 90": ("personal.coverage90", "pooled", "{:.3f}"),
    "novel RMSE": ("novel.rmse", "mean", "{:.4f}"),
}


def row_of(run: Run) -> dict[str, Any]:
    """Return one run's final figures, unrounded; what a run does not have is None."""
    final, summary = run.summary["final"], run.summary
    columns = CLASSIFICATION if run.classifies else REGRESSION
    figures = {
        column: final[key][figure] if key in final else None
        for column, (key, figure, _) in columns.items()
    }
    return {
        "run": run.label,
        "method": summary["method"],
        "rounds": summary["rounds"],
        **figures,
        "seconds": summary["seconds"]["total"],
        "MB up": summary["bytes"]["up"] / 1e6,
        "MB down": summary["bytes"]["down"] / 1e6,
    }


def compare_table(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row a run. Raises `RunError` for a folder that is no finished run."""
    return [row_of(read_run(path)) for path in runs]


def render_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as aligned text; columns that are empty throughout are left out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [name for name in names if any(row.get(name) is not None for row in rows)]
    cells = [shown, *[[formatted(name, row.get(name)) for name in shown] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def formatted(name: str, value: Any) -> str:
    """Return a cell's text."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    known = {**CLASSIFICATION, **REGRESSION}
    if name in known:
        return known[name][2].format(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)
