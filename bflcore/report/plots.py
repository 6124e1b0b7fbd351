"""The report's pictures, as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from bflcore.report.landscape import Plane
    from bflcore.report.reading import Run

__all__ = ["along", "contours", "learning_curves", "reliability", "retention"]

# Okabe & Ito's palette: distinguishable with colour blindness, on light and dark paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8a8f98"
STYLE: Any = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "bflcore",  # the same run gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), GREY
    ),
}
NAMES = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE", "rmse": "RMSE"}


def learning_curves(runs: Sequence[Run]) -> str:
    """Draw the main metrics over rounds; dashed: the server's model, dotted: validation."""
    names = ("accuracy", "nll", "ece") if runs[0].classifies else ("rmse", "nll", "coverage90")
    with mpl.rc_context(STYLE):
        figure, axes = _figure(len(names))
        for axis, name in zip(axes, names, strict=True):
            for run, colour in zip(runs, cycle(COLOURS), strict=False):
                for group, dashes in (("personal", "-"), ("global", "--"), ("validation", ":")):
                    _series(axis, run, f"{group}.{name}", colour, dashes, group)
            axis.set_xlabel("round")
            axis.set_title(NAMES.get(name, name))
        if axes[0].lines:
            axes[0].legend(frameon=False, fontsize=8)
        return _svg(figure)


def _series(axis: Any, run: Run, key: str, colour: str, dashes: str, group: str) -> None:
    statistic = "pooled" if key.endswith((".ece", ".nll")) else "mean"
    values = {r["round"]: r[key][statistic] for r in run.records if key in r}
    if values:
        label = f"{run.label}, {group}"
        axis.plot([*values], [*values.values()], dashes, color=colour, lw=1.6, label=label)


def reliability(runs: Sequence[Run]) -> str:
    """Draw accuracy over confidence, and how often each confidence occurs."""
    runs = _evaluated(runs)
    with mpl.rc_context(STYLE):
        figure, (upper, lower) = _figure(2)
        upper.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":", label="perfectly calibrated")
        for run, colour in zip(runs, cycle(COLOURS), strict=False):
            bins = run.evaluation["personal"]["reliability"]
            filled = [i for i, n in enumerate(bins["count"]) if n]
            confidence, accuracy = (
                [bins[name][i] for i in filled] for name in ("confidence", "accuracy")
            )
            upper.plot(confidence, accuracy, "o-", color=colour, lw=1.6, ms=4, label=run.label)
            total, width = sum(bins["count"]), 1 / len(bins["count"])
            middles = [(i + 0.5) * width for i in range(len(bins["count"]))]
            shares = [n / total for n in bins["count"]]
            lower.bar(middles, shares, width * 0.9, color=colour, alpha=0.55, label=run.label)
        upper.set(ylabel="accuracy", title="reliability", ylim=(0, 1))
        lower.set(ylabel="share of samples", title="confidence")
        for axis in (upper, lower):
            axis.set(xlabel="confidence", xlim=(0, 1))
        upper.legend(frameon=False, fontsize=8)
        return _svg(figure)


def retention(runs: Sequence[Run]) -> str:
    """Draw accuracy on the samples that are left when the most uncertain are rejected."""
    runs = _evaluated(runs)
    with mpl.rc_context(STYLE):
        figure, (axis,) = _figure(1)
        for run, colour in zip(runs, cycle(COLOURS), strict=False):
            kept = run.evaluation["personal"]["retention"]
            axis.plot(kept["retained"], kept["accuracy"], color=colour, lw=1.6, label=run.label)
        axis.set(xlabel="fraction retained", ylabel="accuracy", xlim=(0, 1), title="retention")
        if runs:
            axis.legend(frameon=False, fontsize=8)
        return _svg(figure)


def along(run: Run, axis: str) -> str:
    """Draw the metrics along a quantity of the method: the mean, and each client in grey."""
    points = run.evaluation["curves"][axis]
    names = [name for name in ("accuracy", "nll", "ece", "rmse") if name in points["mean"]]
    with mpl.rc_context(STYLE):
        figure, axes = _figure(len(names))
        for plot, name in zip(axes, names, strict=True):
            for client in points["clients"]:
                plot.plot(points["values"], client[name], color=GREY, lw=0.6, alpha=0.35)
            plot.plot(points["values"], points["mean"][name], color=COLOURS[0], lw=2)
            plot.set(xlabel=axis, title=NAMES.get(name, name))
        return _svg(figure)


def contours(plane: Plane) -> str:
    """Draw each metric over a plane of parameters, and the networks that span it."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(len(plane.metrics))
        for plot, (name, values) in zip(axes, plane.metrics.items(), strict=True):
            filled = plot.contourf(plane.across, plane.up, values, levels=20, cmap="cividis")
            figure.colorbar(filled, ax=plot)
            for label, (across, up) in plane.marks.items():
                plot.plot(across, up, "o", color="white", mec="black", ms=5)
                plot.annotate(
                    label, (across, up), (4, 4), textcoords="offset points", color="white"
                )
            plot.set_title(NAMES.get(name, name))
        return _svg(figure)


def _figure(columns: int) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(3.6 * columns, 2.9), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.set_facecolor("none")
        axis.grid(color=GREY, alpha=0.2, lw=0.6)
    figure.patch.set_alpha(0)
    return figure, axes


def _evaluated(runs: Sequence[Run]) -> list[Run]:
    """Leave out runs in which no client could be evaluated."""
    return [run for run in runs if "personal" in run.evaluation]


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
