"""The report's section on each client's way through the rounds: a small picture per client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from bflcore.experiments.records import BY_CLIENT
from bflcore.report.reading import Run

__all__ = ["equal_steps", "section"]

T = TypeVar("T")

SHOWN = 24  # clients
TITLES = {"accuracy": "accuracy", "rmse": "RMSE", "nll": "NLL"}
WIDTH, HEIGHT = 120.0, 56.0  # of a picture, in its own units
SENTENCE = (
    "Each client's own model on its own test samples, by round; all pictures of a metric have the "
    "same scale. A model whose NLL (in nats) rises while the other metric does not get worse is "
    "becoming overconfident."
)
ALONE = "Grey: the mean over clients. The worst clients of the last round come first."
TOGETHER = "Numbers and order, the worst first, are those of {} in its last round."
SOME = "{shown} of {all} clients, from the worst to the best in equal steps."
ELSEWHERE = "Left out, because their data are divided otherwise: {}."

Lines = dict[int, list[tuple[int, float]]]  # client -> (round, value)


def section(runs: Sequence[Run], colours: Sequence[str]) -> dict[str, Any]:
    """Return a panel per client, with a picture per metric and in it a line per run.

    None for runs that recorded no clients. `colours` are the runs'. Only runs with the data and the
    partition of the first one are drawn.
    """
    main = "accuracy" if runs[0].classifies else "rmse"
    alike = [run for run in runs if run is runs[0] or _same_clients(run, runs[0])]
    found = {name: [(run, _lines(run, name)) for run in alike] for name in (main, "nll")}
    drawn = [run for run, lines in found[main] if any(len(line) > 1 for line in lines.values())]
    if not drawn:
        return {"panels": [], "sentences": []}
    first = next(lines for run, lines in found[main] if run is drawn[0])
    ordered = _ordered(first, worst_is_low=runs[0].classifies)
    chosen = equal_steps(ordered, SHOWN)
    colour_of = {id(run): colour for run, colour in zip(runs, colours, strict=True)}
    metrics = []
    for name, every in found.items():
        kept = [(colour_of[id(run)], lines) for run, lines in every if any(run is d for d in drawn)]
        average = _mean_line(drawn[0], name) if len(drawn) == 1 else []
        if metric := _metric(name, kept, chosen, average):
            metrics.append(metric)
    others = [run.label for run in runs if not any(run is one for one in alike)]
    panels = [
        {
            "client": runs[0].client(client),
            "pictures": [one["pictures"][i] for one in metrics],
        }
        for i, client in enumerate(chosen)
    ]
    rounds = [number for client in chosen for number, _ in first[client]]
    return {
        "panels": panels,
        "metrics": metrics,
        "first": min(rounds),
        "final": max(rounds),
        "width": WIDTH,
        "height": HEIGHT,
        "sentences": _sentences(drawn[0], len(drawn) == 1, len(chosen), len(ordered), others),
    }


def _metric(
    name: str,
    runs: Sequence[tuple[str, Lines]],
    chosen: Sequence[int],
    average: Sequence[tuple[int, float]],
) -> dict[str, Any] | None:
    """Return a metric's scale and its picture of each client; None where nothing is recorded."""
    points = [point for _, lines in runs for client in chosen for point in lines.get(client, [])]
    if not points:
        return None
    scale = _scale(points, fraction=name == "accuracy")
    pictures = []
    for client in chosen:
        known = [(colour, lines[client]) for colour, lines in runs if client in lines]
        pictures.append(
            {
                "metric": TITLES[name],
                "lines": [{"colour": c, "points": _points(line, scale)} for c, line in known],
                "mean": _points(average, scale) if average else "",
                "last": f"{known[0][1][-1][1]:.3f}" if known else "",
            }
        )
    return {
        "name": TITLES[name],
        "low": f"{scale[2]:.2g}",
        "high": f"{scale[3]:.2g}",
        "pictures": pictures,
    }


def _sentences(
    first: Run, averaged: bool, shown: int, known: int, others: Sequence[str]
) -> list[str]:
    sentences = [f"{SENTENCE} {ALONE if averaged else TOGETHER.format(first.label)}"]
    if shown < known:
        sentences.append(SOME.format(shown=shown, all=known))
    if others:
        sentences.append(ELSEWHERE.format(", ".join(others)))
    return sentences


def _same_clients(run: Run, other: Run) -> bool:
    return run.partitioned is not None and run.partitioned == other.partitioned


def _lines(run: Run, name: str) -> Lines:
    """Return every client's finite values by round."""
    lines: Lines = {}
    for record in run.records:
        columns = record.get(BY_CLIENT, {})
        for client, value in zip(columns.get("client", []), columns.get(name, []), strict=False):
            if value is not None and math.isfinite(value):
                lines.setdefault(int(client), []).append((int(record["round"]), float(value)))
    return lines


def _mean_line(run: Run, name: str) -> list[tuple[int, float]]:
    key = f"personal.{name}"
    found = ((r["round"], r.get(f"sample.{key}", r.get(key))) for r in run.records)
    return [(int(number), float(one["mean"])) for number, one in found if one]


def _ordered(lines: Lines, *, worst_is_low: bool) -> list[int]:
    sign = 1 if worst_is_low else -1
    return sorted(lines, key=lambda client: (sign * lines[client][-1][1], client))


def equal_steps(items: Sequence[T], most: int) -> list[T]:
    """Return some of the items in equal steps, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    step = (len(items) - 1) / (most - 1)
    return [items[round(i * step)] for i in range(most)]


def _scale(points: Sequence[tuple[int, float]], *, fraction: bool) -> tuple[int, int, float, float]:
    rounds, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    if fraction:
        low, high = math.floor(10 * low) / 10, 1.0
    elif low == high:
        low, high = low - 0.5, high + 0.5
    return min(rounds), max(rounds), low, high if high > low else low + 1


def _points(line: Sequence[tuple[int, float]], scale: tuple[int, int, float, float]) -> str:
    """Return the coordinates of a polyline; values outside of the scale lie on its border."""
    first, last, low, high = scale
    placed = []
    for number, value in line:
        across = (number - first) / max(1, last - first)
        up = min(1.0, max(0.0, (value - low) / (high - low)))
        placed.append(f"{WIDTH * across:.1f},{HEIGHT * (1 - up):.1f}")
    return " ".join(placed)
