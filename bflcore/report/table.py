"""Tables of runs: `bfl compare`, the end of `bfl run`, and the report.

A table has one definition for all of its columns: means over clients, or pooled over samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bflcore.errors import RunError
from bflcore.report.reading import Run, by_client, plain
from bflcore.report.statistics import deviation, mean

__all__ = [
    "CLASSIFICATION",
    "MEANING",
    "REGRESSION",
    "final_rows",
    "grid",
    "paired",
    "print_table",
    "row_of",
    "turned",
]

WIDE = 10_000  # characters, more than any line has
MEANING = {
    "mean": "Means, deviations (std) and the worst are over clients, each on its own test samples.",
    "pooled": "Pooled: all clients' test samples counted alike.",
}
CLASSIFICATION = {
    "accuracy": "personal.accuracy",
    "balanced accuracy": "personal.balanced_accuracy",
    "F1": "personal.f1",
    "AUROC": "personal.auroc",
    "ECE": "personal.ece",
    "NLL": "personal.nll",
    "Brier": "personal.brier",
    "AURC": "personal.aurc",
    "global accuracy": "global.accuracy",
    "novel accuracy": "novel.accuracy",
    "validation accuracy": "validation.accuracy",
    "validation NLL": "validation.nll",
    "OOD AUROC": "ood.auroc",
    "OOD FPR95": "ood.fpr95",
}
REGRESSION = {
    "RMSE": "personal.rmse",
    "NMSE": "personal.nmse",
    "NLL": "personal.nll",
    "coverage 90": "personal.coverage90",
    "novel RMSE": "novel.rmse",
    "validation RMSE": "validation.rmse",
    "validation NLL": "validation.nll",
    "OOD AUROC": "ood.auroc",
    "OOD FPR95": "ood.fpr95",
}
ONE_DECIMAL = ("seconds", "MB up", "MB down")


def row_of(run: Run, statistic: str = "mean") -> dict[str, Any]:
    """Return one run's final metrics, unrounded: the `statistic` mean or pooled of each.

    Metrics that the run does not have are None.
    """
    summary, columns = run.summary, CLASSIFICATION if run.classifies else REGRESSION
    values = {name: summary["final"].get(key, {}).get(statistic) for name, key in columns.items()}
    main = next(iter(columns))
    rounds = summary["rounds"]
    if run.unfinished:
        rounds = f"{rounds} of {run.experiment['rounds']}"
    row: dict[str, Any] = {"run": run.label, "method": summary["method"], "rounds": rounds}
    row[main] = values.pop(main)
    if statistic != "mean":
        return row | values
    row["std over clients"] = summary["final"].get(columns[main], {}).get("std")
    worst = run.worst
    row["worst"] = worst and worst[columns[main].removeprefix("personal.")]
    row["worst client"] = worst and run.client(worst["client"])
    return row | {
        **values,
        "seconds": summary["seconds"]["total"],
        "MB up": summary["bytes"]["up"] / 1e6,
        "MB down": summary["bytes"]["down"] / 1e6,
    }


def final_rows(run: Run) -> list[dict[str, Any]]:
    """Return a row for each of a run's final metrics: mean and std over clients, and pooled."""
    columns, final = CLASSIFICATION if run.classifies else REGRESSION, run.summary["final"]
    return [
        {"metric": name} | {kind: final[key][kind] for kind in ("mean", "std", "pooled")}
        for name, key in columns.items()
        if key in final
    ]


def paired(run: Run, other: Run) -> dict[str, Any]:
    """Compare a run with another one on the same clients, client by client.

    Returns on how many clients it is worse, of how many, and the mean difference of accuracy (of a
    regression: of the error) with its standard error over clients. Raises `RunError` unless both
    have the same data, divided alike.
    """
    if run.partitioned != other.partitioned or run.partitioned is None:
        raise RunError(
            f"{run.label} and {other.label} cannot be compared client by client: their data or "
            "partition differ; run both with the same --data, --partition and --seed"
        )
    metric, better = ("personal.accuracy", 1) if run.classifies else ("personal.rmse", -1)
    ours, theirs = (by_client(one.evaluation, metric) for one in (run, other))
    differences = [value - theirs[client] for client, value in ours.items() if client in theirs]
    count = len(differences)
    if not count:
        raise RunError(f"{run.label} and {other.label} have no client with test samples in common")
    spread = deviation(differences)
    return {
        "worse": sum(better * difference < 0 for difference in differences),
        "clients": count,
        "difference": mean(differences),
        "standard error": None if spread is None else spread / math.sqrt(count),
    }


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows, one per line; columns that are empty throughout are left out.

    On a terminal that is too narrow, each row becomes a column; elsewhere every line is complete.
    """
    columns, cells = grid(rows)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    table = _table(columns, cells)
    unbounded = console.options.update(max_width=WIDE)
    if console.measure(table, options=unbounded).maximum > console.width:
        table = _table(*turned(columns, cells))
    console.print(table)


def turned(
    columns: Sequence[str], cells: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Make rows of columns, and columns of rows."""
    first, *others = map(list, zip(columns, *cells, strict=True))
    return first, others


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        is_text = i == 0 or name in {"run", "method", "cell", "verdict"}
        table.add_column(Text(name), justify="left" if is_text else "right", no_wrap=not is_text)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def grid(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and formatted cells; columns that are empty throughout are left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) is not None for row in rows)]
    cells = [[_format(name, row.get(name)) for name in columns] for row in rows]
    return [plain(name) for name in columns], cells


def _format(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return plain(value)
    return f"{value:.1f}" if name in ONE_DECIMAL else f"{round(value, 4) + 0.0:.4f}"  # not -0
