"""The picture of a study: a metric along a numeric axis, or a point with error bars per cell."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl

from bflcore.report.plots import STYLE, canvas, line_style, points, short, svg
from bflcore.report.reading import plain
from bflcore.report.statistics import deviation, mean
from bflcore.studies.cells import Cell
from bflcore.studies.results import Results

__all__ = ["numeric_axis", "plot"]

WIDE_SPAN = 20  # a ratio of the largest to the smallest value from which a scale is logarithmic
SAID = "mean ± sd over seeds"


def numeric_axis(cells: Sequence[Cell]) -> str:
    """Return the axis of a grid with numbers for values; empty unless there is exactly one."""
    values: dict[str, set[str]] = {}
    for cell in cells:
        for key, text in cell.point.items():
            values.setdefault(key, set()).add(text)
    found = [k for k, texts in values.items() if len(texts) > 1 and all(map(_is_number, texts))]
    return found[0] if len(found) == 1 else ""


def plot(results: Results, metrics: Sequence[str]) -> str:
    """Draw the metrics' means over seeds with their standard deviations, as SVG."""
    axis = numeric_axis(results.cells)
    if not axis:
        return _points(results, metrics)
    with mpl.rc_context(STYLE):
        return _along(results, metrics, axis)


def _along(results: Results, metrics: Sequence[str], axis: str) -> str:
    """Draw a line over the axis for every combination of what else differs."""
    lines: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if axis in cell.point:
            others = [f"{k}={v}" for k, v in cell.point.items() if k != axis]
            lines.setdefault(", ".join([cell.stem or cell.method, *others]), []).append(cell)
    places = sorted({float(cell.point[axis]) for line in lines.values() for cell in line})
    figure, axes = canvas(len(metrics))
    for metric, drawn in zip(metrics, axes, strict=True):
        for number, (name, cells) in enumerate(lines.items()):
            at = sorted(cells, key=lambda cell: float(cell.point[axis]))
            values = [
                (float(c.point[axis]), list(results.values(c.name, metric).values())) for c in at
            ]
            filled = [(x, found) for x, found in values if found]
            drawn.errorbar(
                [x for x, _ in filled],
                [mean(found) for _, found in filled],
                [deviation(found) or 0.0 for _, found in filled],
                **line_style(number),
                label=short(name),
                marker="o",
                ms=4,
                lw=1.6,
                capsize=3,
            )
        if places[0] > 0 and places[-1] / places[0] >= WIDE_SPAN:
            drawn.set_xscale("log")
            drawn.set_xticks(places, [f"{place:g}" for place in places])
            drawn.minorticks_off()
        drawn.set(xlabel=plain(axis), title=plain(metric))
    axes[0].set_ylabel(SAID)
    if len(lines) > 1:
        axes[-1].legend(frameon=False, fontsize=7)
    return svg(figure)


def _points(results: Results, metrics: Sequence[str]) -> str:
    """Draw a point with an error bar for every cell, the first on top."""
    names = [cell.name for cell in results.cells]
    columns = {
        metric: [_bar(list(results.values(name, metric).values())) for name in names]
        for metric in metrics
    }
    return points(names, columns, SAID)


def _bar(values: Sequence[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    centre, reach = mean(values), deviation(values) or 0.0
    return centre, centre - reach, centre + reach


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
