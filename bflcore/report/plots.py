"""The report's pictures, as inline SVG."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bflcore.report.comparison import by_settings
from bflcore.report.reading import plain

if TYPE_CHECKING:
    from bflcore.report.landscape import Plane
    from bflcore.report.reading import Run

__all__ = [
    "COLOURS",
    "GREY",
    "LEGIBLE",
    "STYLE",
    "along",
    "canvas",
    "colour_of",
    "confusion",
    "contours",
    "coverage",
    "learning_curves",
    "reliability",
    "retention",
    "scores",
    "svg",
]

# Okabe & Ito's palette: distinguishable with colour blindness, on light and dark paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8a8f98"
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


def colour_of(runs: Sequence[Run], run: Run) -> str:
    """Return the colour of a run, the same in all pictures of a page and in its legend.

    Runs that differ in the seed alone have the same colour.
    """
    groups = enumerate(by_settings(runs))
    place = next(i for i, group in groups if any(one is run for one in group.runs))
    return COLOURS[place % len(COLOURS)]


def learning_curves(runs: Sequence[Run]) -> str:
    """Draw means over clients by round; dashed: the server's model, dotted: validation."""
    names = ("accuracy", "nll", "ece") if runs[0].classifies else ("rmse", "nll", "coverage90")
    with mpl.rc_context(STYLE):
        figure, axes = canvas(len(names))
        for axis, name in zip(axes, names, strict=True):
            for run in runs:
                for group, dashes in (("personal", "-"), ("global", "--"), ("validation", ":")):
                    key = f"{group}.{name}"
                    # Of the clients that all evaluations share, where some cover a sample.
                    found = {r["round"]: r.get(f"sample.{key}", r.get(key)) for r in run.records}
                    values = {number: one["mean"] for number, one in found.items() if one}
                    lone = {"marker": "o", "ms": 3} if len(values) == 1 else {}
                    style = {"color": colour_of(runs, run), "lw": 1.6, **lone}
                    axis.plot([*values], [*values.values()], dashes, **style)
            axis.set_xlabel("round")
            axis.set_title(NAMES.get(name, plain(name)))
        return svg(figure)


def reliability(runs: Sequence[Run]) -> str:
    """Draw accuracy over confidence, and how often each confidence occurs."""
    with mpl.rc_context(STYLE):
        figure, (upper, lower) = canvas(2)
        upper.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
        for run in filter(_evaluated, runs):
            colour = colour_of(runs, run)
            bins = run.evaluation["personal"]["reliability"]
            filled = [i for i, n in enumerate(bins["count"]) if n]
            confidence, accuracy = (
                [bins[name][i] for i in filled] for name in ("confidence", "accuracy")
            )
            upper.plot(confidence, accuracy, "o-", color=colour, lw=1.6, ms=4)
            total, width = sum(bins["count"]), 1 / len(bins["count"])
            middles = [(i + 0.5) * width for i in range(len(bins["count"]))]
            shares = [n / total for n in bins["count"]]
            lower.bar(middles, shares, width * 0.9, color=colour, alpha=0.55)
        upper.set(ylabel="accuracy", title="reliability", ylim=(0, 1))
        lower.set(ylabel="share of samples", title="confidence")
        for axis in (upper, lower):
            axis.set(xlabel="confidence", xlim=(0, 1))
        return svg(figure)


def retention(runs: Sequence[Run]) -> str:
    """Draw accuracy and error on the samples that are left when the most uncertain are rejected.

    Dotted: the error if all errors were rejected first.
    """
    with mpl.rc_context(STYLE):
        figure, (axis, risk) = canvas(2)
        for run in filter(_evaluated, runs):
            kept, colour = run.evaluation["personal"]["retention"], colour_of(runs, run)
            axis.plot(kept["retained"], kept["accuracy"], color=colour, lw=1.6)
            errors = [1 - accuracy for accuracy in kept["accuracy"]]
            risk.plot(kept["retained"], errors, color=colour, lw=1.6)
            steps = [i / 50 for i in range(1, 51)]
            ideal = [max(0.0, 1 - (1 - errors[-1]) / step) for step in steps]
            risk.plot(steps, ideal, color=colour, lw=1, ls=":")
        axis.set(xlabel="fraction retained", ylabel="accuracy", xlim=(0, 1), title="retention")
        risk.set(xlabel="fraction retained", ylabel="error", xlim=(0, 1), title="selective risk")
        return svg(figure)


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


def scores(runs: Sequence[Run], run: Run) -> str:
    """Draw how test samples (filled) and foreign ones (outlined) share out among scores."""
    found = run.evaluation["ood"]["scores"]
    edges = found["borders"]
    width = edges[1] - edges[0]
    edges = [edges[0] - width, *edges, edges[-1] + width]
    with mpl.rc_context(STYLE):
        figure, (axis,) = canvas(1, width=5.4)
        for name, colour, fill in (
            ("own", colour_of(runs, run), True),
            ("foreign", COLOURS[1] if colour_of(runs, run) != COLOURS[1] else COLOURS[0], False),
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


def canvas(columns: int, width: float = 3.6, height: float = 2.9) -> tuple[Figure, list[Any]]:
    """Return a figure with axes side by side; `width` and `height` of each in inches."""
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.set_facecolor("none")
        axis.grid(color=GREY, alpha=0.2, lw=0.6)
    figure.patch.set_alpha(0)
    return figure, axes


def _evaluated(run: Run) -> bool:
    return "personal" in run.evaluation


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
