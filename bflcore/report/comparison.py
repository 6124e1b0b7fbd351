"""The report's comparison of runs: intervals over clients or seeds, and the best of each column."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import attrs

from bflcore.problem.directions import direction
from bflcore.problem.metrics import selective_risk
from bflcore.report.intervals import half_width
from bflcore.report.reading import Run, plain
from bflcore.report.statistics import paired
from bflcore.report.table import CLASSIFICATION, REGRESSION

__all__ = ["Group", "by_settings", "section"]

BEST, EQUAL = "best", "equal"
POOLED = "AURC, pooled"
COSTS = {"seconds": "seconds", "MB up": "up", "MB down": "down"}
SENTENCE = (
    "The last round; a heading sorts. Bold: the best of a column; ≈: not distinguishable from it, "
    "because the 95 % interval of the paired difference contains 0."
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
        return {int(run.experiment["seed"]): run for run in self.runs}


def by_settings(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in the seed alone, in the order of their first ones."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        apart = {k: v for k, v in run.experiment.items() if k not in {"seed", "log"}}
        members = found.setdefault(json.dumps(apart, sort_keys=True, default=str), [])
        if any(one.experiment.get("seed") == run.experiment.get("seed") for one in members):
            members = found.setdefault(f"{len(found)} {run.label}", [])  # the same run twice
        members.append(run)
    groups, used = [], set[str]()
    for members in found.values():
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
    cells = []
    for i, (group, mean) in enumerate(zip(groups, means, strict=True)):
        if mean is None:
            cells.append(_text(""))
            continue
        around = half_width(_values(group, key))
        mark = "" if best is None else _mark(groups, i, best, key)
        cell = _text(f"{mean:.4f}") | {"mark": mark}
        cells.append(cell | {"around": "" if around is None else f"{around:.4f}"})
    return cells


def _mark(groups: Sequence[Group], one: int, best: int, key: str) -> str:
    if one == best:
        return BEST
    found = paired_interval(groups[one], groups[best], key)
    return EQUAL if found and found[0] <= 0 <= found[1] else ""


def paired_interval(one: Group, other: Group, key: str) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference, paired over seeds or else over clients.

    None if there are no pairs: fewer than two common seeds, or clients with other data.
    """
    common = sorted(one.seeds.keys() & other.seeds.keys())
    if len(common) > 1:
        pairs = [(_of(one.seeds[s], key), _of(other.seeds[s], key)) for s in common]
    elif len(common) == 1 and key:
        first, second = (group.seeds[common[0]] for group in (one, other))
        if first.partitioned is None or first.partitioned != second.partitioned:
            return None
        mine, theirs = _by_client(first, key), _by_client(second, key)
        pairs = [(mine[client], theirs[client]) for client in mine if client in theirs]
    else:
        return None
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    found = paired(differences)
    return None if found.low is None or found.high is None else (found.low, found.high)


def _mean(group: Group, key: str) -> float | None:
    values = [value for run in group.runs if (value := _of(run, key)) is not None]
    return sum(values) / len(values) if len(values) == len(group.runs) else None


def _values(group: Group, key: str) -> list[float]:
    """Return the values whose mean it is: of each seed, or of each client of a lone run."""
    if len(group.runs) == 1:
        return list(_by_client(group.runs[0], key).values()) if key else []
    return [value for run in group.runs if (value := _of(run, key)) is not None]


def _of(run: Run, key: str) -> float | None:
    """Return a run's final metric: the mean over clients; without a key, the pooled AURC."""
    if key:
        found = run.summary["final"].get(key, {}).get("mean")
        return None if found is None else float(found)
    curve = run.evaluation.get("personal", {}).get("retention")
    return selective_risk(curve)[0] if curve else None


def _by_client(run: Run, key: str) -> dict[int, float]:
    group, _, name = key.rpartition(".")
    clients = run.evaluation.get(group, {}).get("clients", [])
    return {one["client"]: float(one[name]) for one in clients if name in one}


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
