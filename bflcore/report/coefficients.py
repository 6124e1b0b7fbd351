"""Coefficients with credible intervals: a table, and a forest plot for the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bflcore.experiments.coefficients import FILE, INTERCEPT, Coefficient, read_coefficients
from bflcore.lazy import lazy
from bflcore.report.table import grid

if TYPE_CHECKING:
    import matplotlib as mpl

    from bflcore.report import plots
else:
    mpl = lazy("matplotlib")
    plots = lazy("bflcore.report.plots")

__all__ = ["forest", "rows_of", "section"]

LONGEST = 60  # coefficients in a picture
SENTENCE = (
    "Per unit of each column, and per category against the first one: posterior mean and standard "
    "deviation, and the central 95 % credible interval."
)


def rows_of(found: Sequence[Coefficient]) -> list[dict[str, Any]]:
    """Return a row per coefficient; the ratio is named after the likelihood."""
    several = len({one.output for one in found}) > 1
    return [
        {
            **({"output": one.output} if several else {}),
            "coefficient": one.feature,
            "mean": one.mean,
            "sd": one.sd,
            "lower": one.lower,
            "upper": one.upper,
            **({one.called: one.ratio} if one.called else {}),
        }
        for one in found
    ]


def section(path: Path) -> dict[str, Any]:
    """Return the table and the picture of a run directory; no rows if it has no coefficients."""
    if not (path / FILE).is_file():
        return {"columns": [], "rows": [], "svg": "", "sentence": ""}
    found = read_coefficients(path)
    columns, rows = grid(rows_of(found))
    return {"columns": columns, "rows": rows, "svg": forest(found), "sentence": SENTENCE}


def forest(found: Sequence[Coefficient]) -> str:
    """Draw means and intervals, without the intercepts, which have another scale."""
    shown = [one for one in found if one.feature != INTERCEPT][:LONGEST]
    if not shown:
        return ""
    several = len({one.output for one in shown}) > 1
    names = [f"{one.output}: {one.feature}" if several else one.feature for one in shown]
    with mpl.rc_context(plots.STYLE):
        figure, (axis,) = plots.canvas(1, width=6.5, height=0.8 + 0.24 * len(shown))
        rows = range(len(shown), 0, -1)
        means = [one.mean for one in shown]
        reach = [0.0 if one.upper is None else one.upper - one.mean for one in shown]
        axis.axvline(0, color=plots.GREY, lw=0.8, ls=":")
        axis.errorbar(means, rows, xerr=reach, fmt="o", ms=4, color=plots.COLOURS[0], capsize=2)
        axis.set_yticks(rows, names, parse_math=False)
        axis.set_xlabel("coefficient")
        return plots.svg(figure)
