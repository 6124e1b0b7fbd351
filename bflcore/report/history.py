"""The report's section on each client's way through the rounds: a small picture per client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bflcore.experiments.records import BY_CLIENT
from bflcore.report.reading import Run

__all__ = ["section"]

SHOWN = 24  # clients
WIDTH, HEIGHT = 120.0, 56.0  # of a picture, in its own units
SENTENCE = (
    "Each client's own model on its own test samples, by round; all pictures have the same scale."
)
ALONE = "Grey: the mean over clients. The worst clients of the last round come first."
TOGETHER = "Numbers and order, the worst first, are those of {} in its last round."
SOME = "{shown} of {all} clients, from the worst to the best in equal steps."
ELSEWHERE = "Left out, because their data are divided otherwise: {}."

Lines = dict[int, list[tuple[int, float]]]  # client -> (round, value)


def section(runs: Sequence[Run], colours: Sequence[str]) -> dict[str, Any]:
    """Return a panel per client, with a line per run; none for runs that recorded no clients.

    `colours` are the runs'. Only runs with the data and the partition of the first one are drawn.
    """
    name = "accuracy" if runs[0].classifies else "rmse"
    alike = [run for run in runs if run is runs[0] or _same_clients(run, runs[0])]
    found = [(run, _lines(run, name)) for run in alike]
    found = [(run, lines) for run, lines in found if any(len(line) > 1 for line in lines.values())]
    empty: dict[str, Any] = {"panels": [], "sentences": []}
    if not found:
        return empty
    ordered = _ordered(found[0][1], worst_is_low=runs[0].classifies)
    chosen = _spread(ordered)
    points = [p for _, lines in found for client in chosen for p in lines.get(client, [])]
    scale = _scale(points, fraction=name == "accuracy")
    colour_of = {id(run): colour for run, colour in zip(runs, colours, strict=True)}
    average = _mean_line(found[0][0], name) if len(found) == 1 else []
    panels = []
    for client in chosen:
        drawn = [
            {"colour": colour_of[id(run)], "points": _points(lines[client], scale)}
            for run, lines in found
            if client in lines
        ]
        last = found[0][1][client][-1][1]
        panels.append({"client": runs[0].client(client), "lines": drawn, "last": f"{last:.3f}"})
    others = [run.label for run in runs if not any(run is one for one in alike)]
    return {
        "panels": panels,
        "mean": _points(average, scale) if average else "",
        "metric": name if name == "accuracy" else "RMSE",
        "low": f"{scale[2]:.2g}",
        "high": f"{scale[3]:.2g}",
        "first": scale[0],
        "final": scale[1],
        "width": WIDTH,
        "height": HEIGHT,
        "sentences": _sentences(found[0][0], bool(average), len(chosen), len(ordered), others),
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


def _spread(ordered: Sequence[int]) -> list[int]:
    """Return some of the clients in equal steps, the first and the last among them."""
    if len(ordered) <= SHOWN:
        return list(ordered)
    step = (len(ordered) - 1) / (SHOWN - 1)
    return [ordered[round(i * step)] for i in range(SHOWN)]


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
