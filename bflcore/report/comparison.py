"""The report's comparison of runs: intervals over clients or seeds, and the best of each column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import attrs

from bflcore.problem.directions import direction
from bflcore.problem.metrics import selective_risk
from bflcore.report.intervals import half_width
from bflcore.report.reading import Run, by_client, plain
from bflcore.report.statistics import Difference, holm, paired
from bflcore.report.table import CLASSIFICATION, REGRESSION

__all__ = ["Group", "by_settings", "section"]

BEST, EQUAL, UNPAIRED = "best", "equal", "unpaired"
SIGNIFICANT = 0.05
POOLED = "AURC, pooled"
COSTS = {"seconds": "seconds", "MB up": "up", "MB down": "down"}
SENTENCE = (
    "The last round; a heading sorts. Bold: the best of a column; ≈: not distinguishable from it "
    f"(p of the paired difference at least {SIGNIFICANT:g}, adjusted by Holm's method for the "
    "column); ?: not compared with it, for want of pairs: other seeds, data or partition."
)
OVER = {
    "seeds": "± is half of the 95 % interval of the mean over seeds (Student's t).",
    "clients": "± is half of the 95 % interval of the mean over clients (Student's t); it says "
    "nothing of other seeds.",
}


@attrs.frozen(eq=False)
class Group:
    """Runs that differ in the seed alone; `label` tells groups apart."""

    label: str
    runs: list[Run]

    @property
    def seeds(self) -> dict[int, Run]:
        """The runs by seed."""
        return {run.seed: run for run in self.runs}


def by_settings(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in the seed alone, in the order of their first ones.

    A run whose seed a group has already begins another one.
    """
    found: list[list[Run]] = []
    for run in runs:
        alike = (one for one in found if one[0].settings == run.settings)
        fits = (one for one in alike if run.seed not in {other.seed for other in one})
        members = next(fits, None)
        if members is None:
            found.append(members := [])
        members.append(run)
    groups, used = [], set[str]()
    for members in found:
        label = _label(members)
        label = label if label not in used else ", ".join(run.label for run in members)
        used.add(label)
        groups.append(Group(label, members))
    return groups


def _label(runs: Sequence[Run]) -> str:
    labels, cells = [run.label for run in runs], {run.cell for run in runs}
    if len(cells) == 1 and runs[0].cell:
        return plain(runs[0].cell)
    if len(labels) == 1:
        return labels[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    shared = "".join(letters[0] for letters in alike)
    return shared.rstrip("-_. ") or plain(runs[0].summary["method"])


def section(runs: Sequence[Run]) -> dict[str, Any]:
    """Return columns, rows of marked cells, and sentences; no rows for a single run."""
    if len(runs) < 2:
        return {"columns": [], "rows": [], "sentences": []}
    groups = by_settings(runs)
    several = any(len(group.runs) > 1 for group in groups)
    columns = CLASSIFICATION if runs[0].classifies else REGRESSION
    # Runs made before the AURC was recorded have it pooled, from their curves: then all have.
    if not all(columns.get("AURC", "") in {"", *run.summary["final"]} for run in runs):
        columns = {(POOLED if name == "AURC" else name): key for name, key in columns.items()}
        columns[POOLED] = ""
    table = {name: _column(groups, key) for name, key in columns.items()}
    table = {name: cells for name, cells in table.items() if any(c["text"] for c in cells)}
    first = {"method": [_text(str(group.runs[0].summary["method"])) for group in groups]}
    if several:
        first["seeds"] = [_number(len(group.runs), "{:.0f}") for group in groups]
    last = {name: [_cost(group, key) for group in groups] for name, key in COSTS.items()}
    named = {"run": [_text(group.label) for group in groups]}
    every = {**named, **first, **table, **last}
    if every["run"] == every["method"]:
        del every["method"]
    return {
        "columns": list(every),
        "rows": [list(row) for row in zip(*every.values(), strict=True)],
        "sentences": [SENTENCE, *(OVER[kind] for kind in _kinds(groups))],
    }


def _kinds(groups: Sequence[Group]) -> Iterator[str]:
    counts = {len(group.runs) > 1 for group in groups}
    if True in counts:
        yield "seeds"
    if False in counts:
        yield "clients"


def _column(groups: Sequence[Group], key: str) -> list[dict[str, Any]]:
    """Return a column's cells; without a key, of the AURC from the curves."""
    means = [_mean(group, key) for group in groups]
    known = [i for i, mean in enumerate(means) if mean is not None and math.isfinite(mean)]
    best = None
    sign = direction(key or "aurc")
    if len(known) > 1 and sign:
        best = max(known, key=lambda i: sign * (means[i] or 0.0))
    marks = {} if best is None else _marks(groups, best, key)
    cells = []
    for i, (group, mean) in enumerate(zip(groups, means, strict=True)):
        if mean is None:
            cells.append(_text(""))
            continue
        around = half_width(_values(group, key))
        cell = _text(f"{mean:.4f}") | {"mark": marks.get(i, "")}
        cells.append(cell | {"around": "" if around is None else f"{around:.4f}"})
    return cells


def _marks(groups: Sequence[Group], best: int, key: str) -> dict[int, str]:
    """Mark a column's best, what cannot be told from it, and what cannot be compared with it."""
    others = [i for i in range(len(groups)) if i != best]
    pairs = {i: paired_difference(groups[i], groups[best], key) for i in others}
    known = {i: found.p for i, found in pairs.items() if found and found.p is not None}
    marks = {best: BEST} | {i: UNPAIRED for i in others if i not in known}
    adjusted = zip(known, holm(list(known.values())), strict=True)
    return marks | {i: EQUAL if p >= SIGNIFICANT else "" for i, p in adjusted}


def paired_difference(one: Group, other: Group, key: str) -> Difference | None:
    """Return the mean difference, paired over seeds or else over clients.

    None if there are no pairs: fewer than two common seeds, or clients with other data.
    """
    common = sorted(one.seeds.keys() & other.seeds.keys())
    if len(common) > 1:
        pairs = [(_of(one.seeds[s], key), _of(other.seeds[s], key)) for s in common]
    elif len(common) == 1 and key:
        first, second = (group.seeds[common[0]] for group in (one, other))
        if first.partitioned is None or first.partitioned != second.partitioned:
            return None
        mine, theirs = by_client(first.evaluation, key), by_client(second.evaluation, key)
        pairs = [(mine[client], theirs[client]) for client in mine if client in theirs]
    else:
        return None
    return paired([a - b for a, b in pairs if a is not None and b is not None])


def _mean(group: Group, key: str) -> float | None:
    values = [value for run in group.runs if (value := _of(run, key)) is not None]
    return sum(values) / len(values) if len(values) == len(group.runs) else None


def _values(group: Group, key: str) -> list[float]:
    """Return the values whose mean it is: of each seed, or of each client of a lone run."""
    if len(group.runs) == 1:
        return list(by_client(group.runs[0].evaluation, key).values()) if key else []
    return [value for run in group.runs if (value := _of(run, key)) is not None]


def _of(run: Run, key: str) -> float | None:
    """Return a run's final metric: the mean over clients; without a key, the pooled AURC."""
    if key:
        found = run.summary["final"].get(key, {}).get("mean")
        return None if found is None else float(found)
    curve = run.evaluation.get("personal", {}).get("retention")
    return selective_risk(curve)[0] if curve else None


def _cost(group: Group, key: str) -> dict[str, Any]:
    each = [
        run.summary["seconds"]["total"] if key == "seconds" else run.summary["bytes"][key] / 1e6
        for run in group.runs
    ]
    return _number(sum(each) / len(each), "{:.1f}")


def _number(value: float, form: str) -> dict[str, Any]:
    return _text(form.format(value))


def _text(text: str) -> dict[str, Any]:
    return {"text": plain(text), "around": "", "mark": ""}
