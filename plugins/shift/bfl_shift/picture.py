"""The picture of the leaderboard: each method's rank under each shift."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np

from bfl_shift.ranks import overall, ranks
from bfl_shift.table import Table
from bflcore.report.plots import STYLE, canvas, svg

__all__ = ["draw", "mean_ranks"]


def mean_ranks(table: Table) -> tuple[list[str], Any]:
    """Return the methods, the best first, and their ranks ``[M, S]``, means over seeds."""
    methods = list(overall(table))
    found = np.full((len(methods), len(table.shifts)), np.nan)
    for column, shift in enumerate(table.shifts):
        places = ranks(table, shift)
        for row, method in enumerate(methods):
            if places.get(method):
                found[row, column] = np.mean([*places[method].values()])
    return methods, found


def draw(table: Table) -> str:
    """Return an SVG: a row per method, the best first, a column per shift, darker is better."""
    methods, found = mean_ranks(table)
    height = 1.2 + 0.19 * len(methods)
    with mpl.rc_context(STYLE):
        figure, (axis,) = canvas(1, width=7.2, height=height)
        axis.grid(visible=False)
        axis.pcolormesh(found, cmap="cividis", vmin=1, vmax=max(2, len(methods)))
        for (row, column), place in np.ndenumerate(found):
            if np.isfinite(place):
                ink = "black" if place > len(methods) / 2 else "white"
                text = f"{place:.0f}"
                axis.text(
                    column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=7
                )
        axis.set_xticks(np.arange(len(table.shifts)) + 0.5, table.shifts, rotation=30, ha="left")
        axis.set_yticks(np.arange(len(methods)) + 0.5, methods, fontsize=8)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        axis.invert_yaxis()
        return svg(figure)
