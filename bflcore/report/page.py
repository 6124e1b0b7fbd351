"""report.html: one self-contained page that loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from bflcore.errors import RunError
from bflcore.files import write_text
from bflcore.report import calibration, plots
from bflcore.report.reading import Run, read_run
from bflcore.report.table import grid, row_of

__all__ = ["render_page", "write_report"]

BAR = 90  # pixels of the longest bar in the table of clients


def write_report(runs: Sequence[Path], out: Path | None = None, *, landscape: bool = False) -> Path:
    """Write the report of one run (into its folder) or of several (``report.html`` here).

    With `landscape` each run's loss is drawn on a plane of parameters, from its checkpoint.
    Raises `RunError` when a run cannot be read or the page cannot be written.
    """
    read = [read_run(path) for path in runs]
    if len({run.classifies for run in read}) > 1:
        raise RunError(
            "classification and regression runs cannot share a report; give runs of one kind"
        )
    target = out or (read[0].path / "report.html" if len(read) == 1 else Path("report.html"))
    page = render_page(read, [_landscape(run) for run in read] if landscape else [])
    try:
        write_text(target, page)
    except OSError as error:
        raise RunError(f"--out: {target} cannot be written ({error.strerror})") from None
    return target


def render_page(runs: Sequence[Run], landscapes: Sequence[dict[str, Any]] = ()) -> str:
    """Return the page as HTML; every text in it is escaped, pictures apart."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("bflcore.report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    classifies = runs[0].classifies
    return environment.get_template("report.html.j2").render(
        title=" vs ".join(run.label for run in runs),
        runs=[_details(run) for run in runs],
        final=_table([row_of(run) for run in runs]),
        best=_table([_best(run) for run in runs]),
        chosen=dict.fromkeys(_chosen(run) for run in runs),
        learning_curves=plots.learning_curves(runs),
        reliability=plots.reliability(runs) if classifies else "",
        retention=plots.retention(runs) if classifies else "",
        calibration=calibration.section(runs),
        landscapes=landscapes,
    )


def _details(run: Run) -> dict[str, Any]:
    settings = run.experiment | {"environment": run.environment}
    return {
        "label": run.label,
        "sentence": _sentence(run),
        "curves": [
            {"axis": axis, "svg": plots.along(run, axis)}
            for axis in run.evaluation.get("curves", {})
        ],
        "clients": _clients(run),
        "dropped": _table(run.summary["dropped"]),
        "settings": tomli_w.dumps(settings),
    }


def _landscape(run: Run) -> dict[str, Any]:
    from bflcore.report.landscape import landscape

    plane = landscape(run)
    return {
        "label": run.label,
        "client": plane.client,
        "networks": list(plane.marks),
        "svg": plots.contours(plane),
    }


def _sentence(run: Run) -> str:
    data = run.experiment["data"]
    model = run.experiment.get("model", {}).get("name", "")
    return (
        f"{run.summary['method']} on {Path(data['data']).name}, {data['clients']} clients "
        f"({data['partition']}), {model}, {run.summary['rounds']} rounds, "
        f"seed {run.experiment['seed']}, {run.summary['seconds']['total']:.0f} s"
    )


def _best(run: Run) -> dict[str, Any]:
    best = run.summary["best"]
    values = {
        key.removeprefix("personal."): f"{value['mean']:.4f}"
        for key, value in best.items()
        if key.startswith("personal.")
    }
    return {"run": run.label, "round": best["round"], **values}


def _chosen(run: Run) -> str:
    """Say on which samples the best round was chosen, and what that makes of its test metrics."""
    chosen: str = run.summary["best"]["chosen"]
    if chosen.endswith("validation data"):
        return f"{run.label}: {chosen}."
    return "The best value was chosen on test data: an upper bound, not a result to report."


def _clients(run: Run) -> dict[str, Any]:
    """Return the table of clients, the worst first, with a bar for the metric that orders them."""
    if "personal" not in run.evaluation:
        return {"columns": [], "rows": []}
    clients = [
        {**client, "client": client.get("id", client["client"])}
        for client in run.evaluation["personal"]["clients"]
    ]
    key, sign = ("accuracy", 1) if run.classifies else ("rmse", -1)
    # A metric that is undefined for a client is missing; a client without `key` comes last.
    clients.sort(key=lambda client: (key not in client, sign * client.get(key, 0)))
    longest = max(client.get(key, 0) for client in clients) or 1.0
    names = ("accuracy", "rmse", "nll", "ece", "brier", "nmse", "coverage90")
    shown = [name for name in names if any(name in client for client in clients)]
    columns = ["client", "examples", *shown]
    rows = [
        {
            "cells": [_number(client.get(name, "-")) for name in columns],
            "bar": round(BAR * client.get(key, 0) / longest),
        }
        for client in clients
    ]
    return {"columns": columns, "rows": rows}


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return dict(zip(("columns", "rows"), grid(rows), strict=True))
