"""The report's pictures, as inline SVG."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bflcore.report.reading import plain

if TYPE_CHECKING:
    from bflcore.report.landscape import Plane
    from bflcore.report.reading import Run

__all__ = [
    "COLOURS",
    "DASHES",
    "GREY",
    "LEGIBLE",
    "NAMES",
    "STYLE",
    "THIN_LINES",
    "along",
    "canvas",
    "confusion",
    "contours",
    "coverage",
    "line_style",
    "points",
    "scores",
    "short",
    "svg",
]

# Okabe & Ito's palette: distinguishable with colour blindness, on light and dark paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Once the colours are used up; beside each, what SVG calls it in the page's legend.
DASHES = {"-": "none", "--": "6 2.6", ":": "1.6 2.6", "-.": "10 2.6 1.6 2.6"}
GREY = "#8a8f98"
LONGEST_NAME = 60
LEGIBLE = 20  # classes in a picture of the confusion matrix
THIN_LINES = 200  # clients drawn one by one
STYLE: Any = {
    "font.size": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name is text, also with dollar signs
    "svg.hashsalt": "bflcore",  # the same run gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), GREY
    ),
}
NAMES = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE", "rmse": "RMSE"}


def line_style(place: int) -> dict[str, Any]:
    """Return the colour and dashes of the line at a place, the same in all pictures of a page."""
    dashes = list(DASHES)
    used_up = place // len(COLOURS)
    return {"color": COLOURS[place % len(COLOURS)], "ls": dashes[used_up % len(dashes)]}


def coverage(
    names: Sequence[str],
    shares: Sequence[float],
    bands: Sequence[tuple[float, float]],
    level: int,
) -> str:
    """Draw each client's share of covered samples, in another colour where outside its band."""
    with mpl.rc_context(STYLE):
        figure, (axis,) = canvas(1, width=6.5, height=2.9)
        drawn = list(zip(shares, bands, strict=True))[:THIN_LINES]
        width = min(8.0, 300 / len(drawn))  # points
        for place, (share, band) in enumerate(drawn):
            axis.vlines(place, *band, color=GREY, lw=width, alpha=0.3)
            inside = band[0] <= share <= band[1]
            axis.plot(place, share, "o", ms=4.5, color=COLOURS[0 if inside else 1])
        axis.axhline(level / 100, color=GREY, lw=1, ls=":")
        axis.set_xticks([])
        if len(drawn) <= LEGIBLE:
            short = [name if len(name) < 10 else f"{name[:8]}..." for name in names]
            axis.set_xticks(range(len(drawn)), short)
        axis.set(xlabel="client", ylabel="coverage", title=f"{level} % per client")
        return svg(figure)


def scores(run: Run, own_colour: str) -> str:
    """Draw how test samples (filled) and foreign ones (outlined) share out among scores."""
    found = run.evaluation["ood"]["scores"]
    edges = found["borders"]
    width = edges[1] - edges[0]
    edges = [edges[0] - width, *edges, edges[-1] + width]
    with mpl.rc_context(STYLE):
        figure, (axis,) = canvas(1, width=5.4)
        for name, colour, fill in (
            ("own", own_colour, True),
            ("foreign", COLOURS[1] if own_colour != COLOURS[1] else COLOURS[0], False),
        ):
            shares = [count / max(1, sum(found[name])) for count in found[name]]
            axis.stairs(shares, edges, fill=fill, color=colour, alpha=0.6 if fill else 1, lw=1.6)
        counts = enumerate(zip(found["own"], found["foreign"], strict=True))
        occupied = [i for i, both in counts if any(both)]
        first, last = min(occupied, default=0), max(occupied, default=len(edges))
        ticks = (0.0001, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)
        axis.set_xticks([math.log(tick / (1 - tick)) for tick in ticks], [f"{t:g}" for t in ticks])
        axis.set_xlim(edges[max(0, first - 3)], edges[min(len(edges) - 1, last + 4)])
        name = "entropy of the prediction / log C" if run.classifies else "epistemic share"
        axis.set(xlabel=f"{name} (scale of log-odds)", ylabel="share of samples")
        return svg(figure)


def confusion(run: Run) -> str:
    """Draw which class is predicted for which, in shares of each class's test samples."""
    counts = run.evaluation["personal"]["confusion"]
    shares = [[n / max(1, sum(row)) for n in row] for row in counts]
    with mpl.rc_context(STYLE):
        size = max(2.9, 0.36 * len(counts))
        figure, (axis,) = canvas(1, width=size, height=size)
        axis.grid(visible=False)
        axis.pcolormesh(shares, cmap="cividis", vmin=0, vmax=1)
        for row, found in enumerate(shares):
            for column, share in enumerate(found):
                if share >= 0.005:  # shown as 1 % or more
                    ink = "black" if share > 0.5 else "white"
                    place, text = (column + 0.5, row + 0.5), f"{100 * share:.0f}"
                    axis.text(*place, text, ha="center", va="center", color=ink, fontsize=7)
        places = [i + 0.5 for i in range(len(counts))]
        labels = [run.class_name(label) for label in range(len(counts))]
        short = [name if len(name) < 10 else f"{name[:8]}..." for name in labels]
        axis.set_xticks(places, short, rotation=0 if max(map(len, short)) < 3 else 90)
        axis.set_yticks(places, short)
        axis.invert_yaxis()
        axis.set(xlabel="predicted class", ylabel="class", aspect="equal", title="per cent")
        return svg(figure)


def along(run: Run, axis: str) -> str:
    """Draw the metrics along a quantity of the method: the mean, and each client in grey."""
    points = run.evaluation["curves"][axis]
    names = [name for name in ("accuracy", "nll", "ece", "rmse") if name in points["mean"]]
    with mpl.rc_context(STYLE):
        figure, axes = canvas(len(names))
        for plot, name in zip(axes, names, strict=True):
            for client in points["clients"][:THIN_LINES]:
                plot.plot(points["values"], client[name], color=GREY, lw=0.6, alpha=0.35)
            plot.plot(points["values"], points["mean"][name], color=COLOURS[0], lw=2)
            plot.set(xlabel=plain(axis), title=NAMES.get(name, plain(name)))
        return svg(figure)


def contours(plane: Plane) -> str:
    """Draw each metric over a plane of parameters, and the networks that span it."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(len(plane.metrics))
        for plot, (name, values) in zip(axes, plane.metrics.items(), strict=True):
            filled = plot.contourf(plane.across, plane.up, values, levels=20, cmap="cividis")
            figure.colorbar(filled, ax=plot)
            middle = (plane.across[0] + plane.across[-1]) / 2
            for label, (across, up) in plane.marks.items():
                plot.plot(across, up, "o", color="white", mec="black", ms=5)
                side, shift = ("left", 4) if across < middle else ("right", -4)
                plot.annotate(
                    plain(label),
                    (across, up),
                    (shift, 4),
                    textcoords="offset points",
                    color="white",
                    ha=side,
                    bbox={"facecolor": "black", "alpha": 0.5, "lw": 0, "pad": 1},
                )
            plot.set_title(NAMES.get(name, plain(name)))
        return svg(figure)


def points(
    names: Sequence[str],
    columns: Mapping[str, Sequence[tuple[float, float, float] | None]],
    said: str,
    lines: Mapping[str, float] | None = None,
) -> str:
    """Draw by name a point with a bar, the first on top: value, lowest and highest, or None.

    `columns` are put side by side; `said` is what the bars are; `lines` mark a value of a column.
    """
    with mpl.rc_context(STYLE):
        figure, axes = canvas(len(columns), height=max(1.8, 0.8 + 0.24 * len(names)))
        for axis, (title, found) in zip(axes, columns.items(), strict=True):
            if title in (lines or {}):
                axis.axvline((lines or {})[title], color=GREY, lw=1, ls=":")
            for place, one in enumerate(found):
                if one:
                    value, low, high = one
                    bar = [[max(0.0, value - low)], [max(0.0, high - value)]]
                    style = {"marker": "o", "ms": 4, "color": COLOURS[0], "capsize": 3}
                    axis.errorbar(value, place, xerr=bar, **style)
            axis.set_yticks(range(len(names)), [short(name) for name in names])
            axis.set(ylim=(len(names) - 0.5, -0.5), title=plain(title))
            if axis is not axes[0]:
                axis.set_yticklabels([])
        axes[0].set_xlabel(said)
        return svg(figure)


def short(name: str) -> str:
    """Return a name as one line that fits beside a picture."""
    text = plain(name)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 4]} ..."


def canvas(
    columns: int, width: float = 3.6, height: float = 2.9, rows: int = 1
) -> tuple[Figure, list[Any]]:
    """Return a figure with axes, row by row; `width` and `height` of each in inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.set_facecolor("none")
        axis.grid(color=GREY, alpha=0.2, lw=0.6)
    figure.patch.set_alpha(0)
    return figure, axes


def svg(figure: Figure) -> str:
    """Return the figure as text to be put inline."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # What matplotlib says of glyphs and of narrow axes is nothing that its reader could mend:
        # the browser draws the text.
        warnings.simplefilter("ignore")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
