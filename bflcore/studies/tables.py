"""Tables of studies, as text for a terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bflcore.errors import unknown
from bflcore.report.reading import plain
from bflcore.report.statistics import deviation, mean
from bflcore.studies.comparison import Comparison
from bflcore.studies.metrics import shown
from bflcore.studies.results import Results

__all__ = ["FORMATS", "comparison_rows", "csv_text", "formatted", "overview", "result_rows"]

FORMATS = ("table", "markdown", "csv", "latex")
DIGITS = 4
TEXT = ("cell", "metric", "verdict")  # columns that are not numbers
SIGNED = re.compile(r"[+-][0-9.]+")
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
}
MEANING = "Mean and standard deviation over seeds of each metric's mean over clients; n: seeds."

Cells = list[dict[str, Any]]


def overview(results: Results, metrics: Sequence[str] = ()) -> Cells:
    """Return a row per cell: where it is on the axes, n, and each metric as mean ± deviation."""
    rows = []
    for cell in results.cells:
        row: dict[str, Any] = {"cell": cell.name, "n": len(results.of(cell.name))}
        for name in metrics or shown(_known(results)):
            values = list(results.values(cell.name, name).values())
            row[name] = _with_deviation(values) if values else None
        rows.append(row)
    return rows


def result_rows(results: Results) -> Cells:
    """Return a row per cell, unrounded: method, axes, n, mean and deviation of every metric."""
    rows = []
    axes = dict.fromkeys(key for cell in results.cells for key in cell.point)
    for cell in results.cells:
        row: dict[str, Any] = {"cell": cell.name, "method": cell.method}
        row |= {key: cell.point.get(key) for key in axes} | {"n": len(results.of(cell.name))}
        for name in sorted(_known(results)):
            values = list(results.values(cell.name, name).values())
            row[f"{name} mean"] = mean(values) if values else None
            row[f"{name} sd"] = deviation(values)
        rows.append(row)
    return rows


def comparison_rows(found: Comparison, *, rounded: bool = True) -> Cells:
    """Return a row per metric and cell; intervals and p-values where there are some."""
    rows = []
    for row in found.rows:
        difference = row.difference
        numbers: dict[str, float | None] = {"mean": row.mean, "sd": row.deviation}
        for column, name in (("difference", "mean"), ("low", "low"), ("high", "high")):
            numbers[column] = getattr(difference, name, None)
        numbers["p"] = row.p
        pairs = difference.n if difference else None
        head = {"metric": row.metric, "cell": row.cell, "n": row.n}
        shown_as = {k: _rounded(k, v) for k, v in numbers.items()} if rounded else numbers
        rows.append({**head, **shown_as, "pairs": pairs, "verdict": row.verdict})
    return rows


def formatted(rows: Sequence[Mapping[str, Any]], form: str, note: str = "") -> str:
    """Return a table in one of `FORMATS`, with a note below; CSV has none.

    Columns that are empty throughout are left out. Raises `OptionError` for another format.
    """
    if form == "csv":
        return csv_text(rows)
    columns, cells = _filled(rows)
    if form == "table":
        return "\n".join([*_aligned([columns, *cells]), *([note] if note else [])]) + "\n"
    if form == "markdown":
        lines = [columns, ["---"] * len(columns), *cells]
        escaped = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        text = "".join(f"| {line} |\n" for line in escaped)
        return f"{text}\n{note}\n" if note else text
    if form == "latex":
        text = "".join("l" if name in TEXT else "r" for name in columns)
        head, *body = (" & ".join(map(_latex, line)) + r" \\" for line in (columns, *cells))
        begin = [f"\\begin{{tabular}}{{{text}}}", r"\hline", head, r"\hline"]
        after = [f"% {note}"] if note else []
        return "\n".join([*begin, *body, r"\hline", r"\end{tabular}", *after]) + "\n"
    raise unknown("format", form, FORMATS)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with every column that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    return buffer.getvalue()


def _known(results: Results) -> set[str]:
    return {name for trial in results.trials for name in trial.metrics}


def _with_deviation(values: Sequence[float]) -> str:
    spread = deviation(values)
    centre = f"{mean(values):.{DIGITS}f}"
    return centre if spread is None else f"{centre} ± {spread:.{DIGITS}f}"


def _rounded(name: str, value: float | None) -> str | None:
    if value is None:
        return None
    if name == "p":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    sign = "+" if name in {"difference", "low", "high"} else ""
    return f"{round(value, DIGITS) + 0.0:{sign}.{DIGITS}f}"  # not -0


def _filled(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells as text; columns that are empty throughout are left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) is not None for row in rows)]
    cells = [[plain("" if row.get(n) is None else row[n]) for n in columns] for row in rows]
    return columns, cells


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _latex(text: str) -> str:
    """Return text as LaTeX shows it; a signed number as mathematics, with a minus."""
    if SIGNED.fullmatch(text):
        return f"${text}$"
    return "".join(LATEX.get(character, character) for character in text)
