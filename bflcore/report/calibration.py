"""The report's section on calibrated predictions: what calibrators changed, and what sets cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bflcore.lazy import lazy
from bflcore.report.intervals import Band, coverage_band
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
    "{label}: each client's share of test samples whose {kind} of {level} % has the target. Grey: "
    "where 95 % of clients are to be expected with so many test samples{because}. {below} of {all} "
    "are below their band and {above} above; {due_below:.1f} and {due_above:.1f} are to be "
    "expected."
)
OWN = " and so few calibration samples of their own, which let the coverage vary (beta-binomial)"
EXACT = " if each is covered at that rate exactly (binomial)"


def covered(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each calibrated run the clients' coverage: picture and sentence."""
    return [found for run in runs if (found := _covered(run))]


def _covered(run: Run) -> dict[str, Any] | None:
    kind = "set" if run.classifies else "interval"
    name = f"{kind}_coverage{PICTURED}"
    every = run.evaluation.get("calibrated", {}).get("clients", [])
    clients = sorted((one for one in every if name in one), key=lambda one: (one[name], str(one)))
    if not clients:
        return None
    shares = [float(one[name]) for one in clients]
    bands = [_band(run, one) for one in clients]
    sentence = COVERED.format(
        label=run.label,
        kind=kind,
        level=PICTURED,
        because=OWN if _by_own_samples(run) else EXACT,
        below=sum(share < band.low for share, band in zip(shares, bands, strict=True)),
        above=sum(share > band.high for share, band in zip(shares, bands, strict=True)),
        all=len(clients),
        due_below=sum(band.below for band in bands),
        due_above=sum(band.above for band in bands),
    )
    names = [run.client(one["client"]) for one in clients]
    pictured = [(band.low, band.high) for band in bands]
    return {"sentence": sentence, "svg": plots.coverage(names, shares, pictured, PICTURED)}


def _band(run: Run, client: dict[str, Any]) -> Band:
    known, number = run.description.get("clients", []), int(client["client"])
    own = int(known[number].get("calibration", 0)) if number < len(known) else 0
    exact = not _by_own_samples(run)
    return coverage_band(int(client["examples"]), PICTURED / 100, None if exact else own)


def _by_own_samples(run: Run) -> bool:
    """Say whether one threshold per client, from its own samples alone, makes the sets."""
    given = run.experiment.get("calibrator", {}).get("conformal", {})
    plain_sets = given.get("group", "none") == "none" and not given.get("confidence")
    return bool(given.get("scope") == "client" and plain_sets)


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
