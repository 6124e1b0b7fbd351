"""The report's section on calibrated predictions: what calibrators changed, and what sets cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bflcore.lazy import lazy
from bflcore.report.intervals import binomial_band
from bflcore.report.table import grid

if TYPE_CHECKING:
    from bflcore.report import plots
    from bflcore.report.reading import Run
else:
    plots = lazy("bflcore.report.plots")

__all__ = ["covered", "section"]

LEVELS = (80, 90, 95)
PICTURED = 90  # the level whose coverage is drawn client by client
SENTENCE = (
    "Personal models on test samples, after calibration on samples that nobody trained on. NLL and "
    "ECE: all clients pooled, before and after. Coverage: the share of test samples whose set or "
    "interval has the target, pooled and of the client with the lowest share; size: classes in a "
    "set, or width of an interval, mean over samples."
)


COVERED = (
    "{label}: each client's share of test samples whose {kind} of {level} % has the target. "
    "Grey: the band that holds 95 % of the shares where the rate is {level} % exactly (binomial). "
    "{below} of {all} clients are below their band, {above} above; {due:.1f} on either side are to "
    "be expected, and somewhat more, because the rate itself varies with the few samples that "
    "calibrate."
)


def covered(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each calibrated run the clients' coverage: level, picture and sentence."""
    return [found for run in runs if (found := _covered(run))]


def _covered(run: Run) -> dict[str, Any] | None:
    kind = "set" if run.classifies else "interval"
    name = f"{kind}_coverage{PICTURED}"
    every = run.evaluation.get("calibrated", {}).get("clients", [])
    clients = [one for one in every if name in one]
    if not clients:
        return None
    bands = [binomial_band(one["examples"], PICTURED / 100) for one in clients]
    pairs = list(zip(clients, bands, strict=True))
    sentence = COVERED.format(
        label=run.label,
        kind=kind,
        level=PICTURED,
        below=sum(one[name] < band[0] for one, band in pairs),
        above=sum(one[name] > band[1] for one, band in pairs),
        all=len(clients),
        due=0.025 * len(clients),
    )
    return {"label": run.label, "sentence": sentence, "svg": plots.coverage(run, PICTURED)}


def section(runs: Sequence[Run]) -> dict[str, Any]:
    """Return columns, rows and an introduction; no rows unless a run was calibrated."""
    rows = [_row(run) for run in runs if "calibrated" in run.evaluation]
    columns, cells = grid(rows)
    return {"columns": columns, "rows": cells, "sentence": SENTENCE}


def _row(run: Run) -> dict[str, Any]:
    before, after = run.evaluation["personal"]["pooled"], run.evaluation["calibrated"]["pooled"]
    clients = run.evaluation["calibrated"]["clients"]
    row: dict[str, Any] = {"run": run.label}
    for name in ("nll", "ece"):
        if name in after:
            row[f"{name.upper()} before"] = _text(before[name])
            row[f"{name.upper()} after"] = _text(after[name])
    kind, size = ("set", "size") if run.classifies else ("interval", "width")
    for level in LEVELS:
        share = f"{kind}_coverage{level}"
        if share in after:
            row[f"{level} % {kind}s: coverage"] = _text(after[share])
            row[f"{level} %: lowest"] = _text(min(client[share] for client in clients))
            row[f"{level} %: {size}"] = _text(after.get(f"{kind}_{size}{level}"))
    if "out_of_distribution" in after:
        row["flagged as strange"] = _text(after["out_of_distribution"])
    return row


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
