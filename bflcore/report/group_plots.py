"""Pictures of groups of runs: means over seeds, and bands from the lowest seed to the highest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from bflcore.report.comparison import Group
from bflcore.report.history import equal_steps
from bflcore.report.plots import (
    COLOURS,
    GREY,
    NAMES,
    STYLE,
    THIN_LINES,
    canvas,
    line_style,
    points,
    svg,
)
from bflcore.report.reading import plain
from bflcore.report.statistics import mean

if TYPE_CHECKING:
    from bflcore.report.reading import Run

__all__ = ["LEVELS", "OVERLAID", "intervals", "learning_curves", "reliability", "retention"]

OVERLAID = len(COLOURS)  # groups at most whose pictures lie on top of each other
DRAWN = 600  # points along rounds of all groups' lines together: the page stays below 2 MB
STEPS = [i / 100 for i in range(1, 101)]  # fractions of samples retained
LEVELS = (50, 90, 95)  # predictive intervals whose coverage is recorded, in per cent
SEEDS = "mean, lowest to highest seed"
EXCESS = "confidence \N{MINUS SIGN} accuracy"
MODELS = {  # dashes where they are in the same axes, and names
    "personal": ("-", "each client's own model"),
    "global": ("--", "the server's model"),
    "validation": (":", "validation samples"),
}

Line = tuple[Sequence[float], Sequence[Sequence[float]]]  # places, and a line per seed


def learning_curves(groups: Sequence[Group]) -> str:
    """Draw means over clients by round: all models of a single group, else a row per model."""
    classifies, alone = groups[0].runs[0].classifies, len(groups) == 1
    names = ("accuracy", "nll", "ece") if classifies else ("rmse", "nll", "coverage90")
    runs = [run for group in groups for run in group.runs]
    models = [m for m in MODELS if any(_by_round(run, f"{m}.{n}") for run in runs for n in names)]
    with mpl.rc_context(STYLE):
        figure, axes = canvas(len(names), rows=1 if alone else max(1, len(models)))
        for i, axis in enumerate(axes):
            row, name = i // len(names), names[i % len(names)]
            for model in models if alone else models[row : row + 1]:
                dashes, title = MODELS[model]
                for place, group in enumerate(groups):
                    line = _along_rounds(group, f"{model}.{name}", DRAWN // len(groups))
                    _draw(axis, line, line_style(place) | ({"ls": dashes} if alone else {}))
                if not alone and name == names[0]:
                    axis.set_ylabel(title)
            axis.set(xlabel="round", title=NAMES.get(name, plain(name)))
        return svg(figure)


def reliability(groups: Sequence[Group]) -> str:
    """Draw accuracy over confidence, and how often each confidence occurs, pooled over seeds.

    Of more groups than can lie on top of each other: the calibration error, and how far confidence
    exceeds accuracy, a point per group.
    """
    if len(groups) > OVERLAID:
        gaps = [[_gaps(run) for run in _evaluated(group)] for group in groups]
        columns = {
            name: [_spread([gap[i] for gap in found]) for found in gaps]
            for i, name in enumerate(("ECE", EXCESS))
        }
        return points([group.label for group in groups], columns, SEEDS, {EXCESS: 0})
    with mpl.rc_context(STYLE):
        figure, (upper, lower) = canvas(2)
        upper.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
        for place, group in enumerate(groups):
            tables = [run.evaluation["personal"]["reliability"] for run in _evaluated(group)]
            if not tables:
                continue
            style, counts = line_style(place), [table["count"] for table in tables]
            total = [sum(column) for column in zip(*counts, strict=True)]
            filled = [i for i, n in enumerate(total) if n]
            confidence, accuracy = (
                [sum(t["count"][i] * t[name][i] for t in tables) / total[i] for i in filled]
                for name in ("confidence", "accuracy")
            )
            upper.plot(confidence, accuracy, "o-", color=style["color"], lw=1.6, ms=4)
            if len(tables) > 1:
                each = [[t["accuracy"][i] for t in tables if t["count"][i]] for i in filled]
                _band(upper, confidence, [*map(min, each)], [*map(max, each)], style["color"])
            shares = [n / sum(total) for n in total]
            edges = [i / len(total) for i in range(len(total) + 1)]
            solid = len(groups) == 1
            lower.stairs(shares, edges, fill=solid, color=style["color"], lw=1.6)
        upper.set(ylabel="accuracy", title="reliability", ylim=(0, 1))
        lower.set(ylabel="share of samples", title="confidence")
        for axis in (upper, lower):
            axis.set(xlabel="confidence", xlim=(0, 1))
        return svg(figure)


def retention(groups: Sequence[Group]) -> str:
    """Draw accuracy and error on the samples that are left when the most uncertain are rejected.

    Dotted, unless there are many groups: the error if all errors were rejected first.
    """
    with mpl.rc_context(STYLE):
        figure, (axis, risk) = canvas(2)
        for place, group in enumerate(groups):
            style = line_style(place)
            found = [_risks(run.evaluation["personal"]["retention"]) for run in _evaluated(group)]
            _draw(axis, (STEPS, [[1 - error for error in errors] for errors in found]), style)
            _draw(risk, (STEPS, found), style)
            if found and len(groups) <= OVERLAID:
                last = mean([errors[-1] for errors in found])
                ideal = [max(0.0, 1 - (1 - last) / step) for step in STEPS]
                risk.plot(STEPS, ideal, color=style["color"], lw=1, ls=":")
        axis.set(xlabel="fraction retained", ylabel="accuracy", xlim=(0, 1), title="retention")
        risk.set(xlabel="fraction retained", ylabel="error", xlim=(0, 1), title="selective risk")
        return svg(figure)


def intervals(groups: Sequence[Group]) -> str:
    """Draw how many targets lie within predictive intervals, over how many should.

    Of a single run each client is drawn, of more groups than can lie on top of each other a point.
    """
    found = [[_coverages(run) for run in _evaluated(group)] for group in groups]
    if len(groups) > OVERLAID:
        columns = {
            f"coverage of {level} % intervals": [
                _spread([mean(run[level]) for run in runs if run[level]]) for runs in found
            ]
            for level in LEVELS
        }
        due = {name: level / 100 for name, level in zip(columns, LEVELS, strict=True)}
        return points([group.label for group in groups], columns, SEEDS, due)
    with mpl.rc_context(STYLE):
        figure, (axis,) = canvas(1, width=4.6, height=3.4)
        axis.plot([LEVELS[0], LEVELS[-1]], [0.5, 0.95], color=GREY, lw=1, ls=":")
        if len(groups) == 1 and len(found[0]) == 1:
            clients = zip(*(found[0][0][level][:THIN_LINES] for level in LEVELS), strict=True)
            for client in clients:
                axis.plot(LEVELS, client, color=GREY, lw=0.6, alpha=0.5)
        for place, runs in enumerate(found):
            lines = [[mean(run[level]) for level in LEVELS] for run in runs]
            _draw(axis, (LEVELS, lines), line_style(place) | {"marker": "o", "ms": 4})
        axis.set_xticks(LEVELS)
        axis.set(xlabel="nominal coverage (%)", ylabel="share of targets inside", ylim=(None, 1.01))
        return svg(figure)


def _evaluated(group: Group) -> list[Run]:
    return [run for run in group.runs if "personal" in run.evaluation]


def _by_round(run: Run, key: str) -> dict[float, float]:
    """Return a mean over clients by round; of those that all evaluations share, where some do."""
    found = {r["round"]: r.get(f"sample.{key}", r.get(key)) for r in run.records}
    return {number: one["mean"] for number, one in found.items() if one}


def _along_rounds(group: Group, key: str, most: int) -> Line:
    """Return a metric's line for each run that has it, at rounds that all of these share."""
    found = [values for run in group.runs if (values := _by_round(run, key))]
    rounds = [number for number in next(iter(found), {}) if all(number in one for one in found)]
    shown = equal_steps(rounds, max(2, most))
    return shown, [[values[number] for number in shown] for values in found]


def _draw(axis: Any, line: Line, style: Mapping[str, Any]) -> None:
    """Draw the mean of lines and the band that they span."""
    places, lines = line
    if not lines or not places:
        return
    columns = [*zip(*lines, strict=True)]
    lone = {"marker": "o", "ms": 3} if len(places) == 1 else {}
    axis.plot(places, [mean(column) for column in columns], **{"lw": 1.6, **lone, **style})
    if len(lines) > 1:
        _band(axis, places, [*map(min, columns)], [*map(max, columns)], style["color"])


def _band(
    axis: Any, places: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str
) -> None:
    axis.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    return (mean(values), min(values), max(values)) if values else None


def _gaps(run: Run) -> tuple[float, float]:
    """Return the calibration error, and confidence minus accuracy, pooled over clients."""
    bins = run.evaluation["personal"]["reliability"]
    rows = zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
    total = sum(bins["count"]) or 1
    gaps = [n / total * (confidence - accuracy) for n, confidence, accuracy in rows]
    return sum(map(abs, gaps)), sum(gaps)


def _risks(curve: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the error at `STEPS`; errors are spread evenly between two points of the curve."""
    kept = [0.0, *curve["retained"]]
    found = zip(curve["retained"], curve["accuracy"], strict=True)
    errors = [0.0, *(share * (1 - accuracy) for share, accuracy in found)]
    risks = []
    for step in STEPS:
        after = min(max(1, bisect_left(kept, step)), len(kept) - 1)
        width = kept[after] - kept[after - 1]
        part = min(1.0, (step - kept[after - 1]) / width) if width else 1.0
        until = errors[after - 1] + part * (errors[after] - errors[after - 1])
        risks.append(until / step)
    return risks


def _coverages(run: Run) -> dict[int, list[float]]:
    """Return each client's coverage by level."""
    clients = run.evaluation["personal"]["clients"]
    return {
        level: [float(one[name]) for one in clients if (name := f"coverage{level}") in one]
        for level in LEVELS
    }
