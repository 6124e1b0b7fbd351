"""report.html: one self-contained page that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from bflcore.errors import RunError
from bflcore.files import write_text
from bflcore.lazy import lazy
from bflcore.problem.metrics import selective_risk
from bflcore.report import calibration, coefficients, comparison, history, samples
from bflcore.report.intervals import half_width
from bflcore.report.reading import Run, plain, read_runs, well_formed, without_steering
from bflcore.report.statistics import mean
from bflcore.report.table import MEANING, final_rows, grid, row_of, turned

if TYPE_CHECKING:
    from bflcore.report import group_plots, plots
else:  # importing matplotlib takes half a second
    group_plots, plots = map(lazy, ("bflcore.report.group_plots", "bflcore.report.plots"))

__all__ = ["render_page", "write_report"]

BAR = 90  # pixels of the longest bar in the table of clients
UPRIGHT = 6  # runs in a table with a column per run
DETAILED = 6  # runs that are shown client by client
TILES = {
    "accuracy": "personal.accuracy",
    "RMSE": "personal.rmse",
    "NLL": "personal.nll",
    "ECE": "personal.ece",
    "90 % intervals cover": "personal.coverage90",
    "OOD AUROC": "ood.auroc",
}
LONGEST = 200  # rows of a table of clients: the page stays below 2 MB
# What pictures of groups show.
BAND = "Of several seeds: their mean, and a band from the lowest to the highest seed."
MODELS_ALONE = (
    "Means over clients. Solid: each client's own model; dashed: the server's model; dotted: "
    "validation samples."
)
MODELS = "Means over clients, in a row per model."
RELIABLE = (
    "Personal models, pooled over all clients' test samples and over seeds. The dotted diagonal is "
    "perfect calibration; colours as above."
)
RELIABLE_MANY = (
    "Personal models, pooled over all clients' test samples. So many reliability diagrams cannot "
    "be told apart: each run's is in its own report. Instead, the calibration error, and how far "
    "confidence exceeds accuracy (right of 0: overconfident), mean over seeds, with a bar from the "
    "lowest to the highest."
)
COVERS = (
    "The share of a client's targets that lie within the predictive intervals of 50, 90 and 95 %, "
    "mean over clients; on the dotted line it is as large as it should be. Below: overconfident. "
    "Grey, of a single run: each client."
)
COVERS_MANY = (
    "The share of a client's targets that lie within the predictive intervals of 50, 90 and 95 %, "
    "mean over clients and seeds, with a bar from the lowest seed to the highest; on the dotted "
    "line it is as large as it should be. Left of it: overconfident."
)
SELECTIVE = (
    "Accuracy and error on the samples that are left when the most uncertain are rejected, pooled "
    "over all clients' test samples."
)
IDEAL = "Dotted: a ranking that rejects all errors first."
EXPLAINED = {
    "ECE": "expected calibration error: how far confidence is from accuracy, averaged over bins of "
    "confidence. 0 is best; few samples make it larger.",
    "NLL": "negative log likelihood of the true label or target, in nats: punishes confident "
    "mistakes most. Lower is better.",
    "Brier": "squared distance between predicted probabilities and the true label, from 0 to 2. "
    "Lower is better.",
    "F1, balanced accuracy": "means over classes, of F1 and of recall: a rare class counts as much "
    "as a frequent one.",
    "AUROC": "probability that a sample of a class gets a higher probability of that class than "
    "another sample; mean over classes. 0.5 is chance.",
    "OOD AUROC, FPR95": "how well the entropy of predictions tells samples unlike the data (--ood) "
    "from test samples; the share of the former that passes when 95 % of the latter do.",
    "epistemic": "the part of the uncertainty that more data would remove; aleatoric: the part "
    "that lies in the data themselves.",
    "retention": "accuracy on the samples that are kept when the most uncertain are rejected: a "
    "model that knows what it does not know rises to the left.",
    "AURC": "area under the curve of error over the fraction retained: the mean error over all "
    "fractions. Lower is better.",
}


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    *,
    landscape: bool = False,
    left_out: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the report of one run (into its folder) or of several (``report.html`` here).

    With `landscape` each run's loss is drawn on a plane of parameters, from its checkpoint.
    `left_out` is told of each run that cannot be read. Raises `RunError` when none can be, or the
    page cannot be written.
    """
    read = read_runs(runs, left_out)
    with well_formed(*read):
        kinds = {run.classifies for run in read}
    if len(kinds) > 1:
        raise RunError(
            "classification and regression runs cannot share a report; give runs of one kind"
        )
    target = out or (read[0].path / "report.html" if len(read) == 1 else Path("report.html"))
    with well_formed(*read):
        page = render_page(read, [_landscape(run) for run in read] if landscape else [])
    write_text(target, page, "--out: " if out else "")
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
    environment.filters["themed"] = themed
    script = environment.get_template("report.js.j2").render()
    evaluated = [run for run in runs if run.tested]
    classifies = bool(evaluated) and runs[0].classifies
    groups = comparison.by_settings(runs)
    detailed = _detailed(runs, groups)
    styles = [plots.line_style(place) for place in range(len(groups))]
    styled = list(zip(groups, styles, strict=True))
    colours = {id(run): style["color"] for group, style in styled for run in group.runs}
    compared = [run for run in detailed if run.tested and "ood" in run.evaluation]
    names = " vs ".join(run.label for run in runs)
    content = {
        "title": names if len(runs) < 4 else f"{len(runs)} runs",
        "policy": _policy(script),
        "script": script,
        "several": len(runs) > 1,
        "runs": [_details(run) for run in detailed],
        "shortened": _shortened(runs, detailed),
        "legend": [
            {"label": group.label, "colour": themed(style["color"])}
            | {"dashes": plots.DASHES[style["ls"]]}
            for group, style in styled
        ],
        "said": _said(groups, classifies=classifies),
        "meaning": MEANING,
        "tiles": _tiles(runs[0]),
        "comparison": comparison.section(runs),
        "final": _table(final_rows(runs[0])),
        "pooled": _upright([row_of(run, "pooled") for run in runs]),
        "best": _upright([_best(run) for run in evaluated]),
        "chosen": dict.fromkeys(_chosen(run) for run in evaluated),
        "learning_curves": group_plots.learning_curves(groups) if evaluated else "",
        "history": history.section(detailed, [themed(colours[id(run)]) for run in detailed]),
        "reliability": group_plots.reliability(groups) if classifies else "",
        "intervals": group_plots.intervals(groups) if evaluated and not classifies else "",
        "retention": group_plots.retention(groups) if classifies else "",
        "risk": _table([_risk(group) for group in groups if _tested(group)] if classifies else []),
        "ood": [
            {"label": run.label, "svg": plots.scores(run, colours[id(run)])} for run in compared
        ],
        "calibration": calibration.section(runs),
        "covered": calibration.covered(detailed),
        "landscapes": landscapes,
        "explained": EXPLAINED,
    }
    content["contents"] = [entry for entry, shown in _contents(content) if shown]
    return without_steering(environment.get_template("report.html.j2").render(content))


def themed(svg: str) -> str:
    """Let the page's style choose the colours of a picture: light and dark paper need others."""
    for place, colour in enumerate(plots.COLOURS):
        svg = re.sub(colour, f"var(--c{place})", svg, flags=re.IGNORECASE)
    return re.sub(plots.GREY, "currentColor", svg, flags=re.IGNORECASE)


def _policy(script: str) -> str:
    """Return what a browser may do for this page: run its own script, and fetch nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def _contents(content: Mapping[str, Any]) -> list[tuple[tuple[str, str], bool]]:
    """Return the anchor and name of every section, and whether the page has it."""
    first = content["runs"][0]
    return [
        (("metrics", "Comparison" if content["several"] else "Metrics"), True),
        (("curves", "Learning curves"), bool(content["learning_curves"])),
        (("history", "Clients over rounds"), bool(content["history"]["panels"])),
        (("calibration", "Calibration"), bool(content["reliability"] or content["intervals"])),
        (("selective", "Selective prediction"), bool(content["reliability"])),
        (("calibrated", "Calibrated"), bool(content["calibration"]["rows"])),
        (("ood", "Out of distribution"), bool(content["ood"])),
        (("samples", "Samples"), bool(first["samples"]["kinds"])),
        (("classes", "Classes"), bool(first["classes"]["rows"])),
        (("clients", "Clients"), True),
        (("meaning", "Meaning"), True),
    ]


def _detailed(runs: Sequence[Run], groups: Sequence[comparison.Group]) -> list[Run]:
    """Return the runs that are shown client by client: all, or of some groups the first one."""
    if len(runs) <= DETAILED:
        return list(runs)
    return [group.runs[0] for group in groups[:DETAILED]]


def _shortened(runs: Sequence[Run], detailed: Sequence[Run]) -> str:
    if len(runs) == len(detailed):
        return ""
    return (
        f"Tables and curves have all {len(runs)} runs; single clients, classes and samples are "
        f"shown of the {len(detailed)} above, and of every run in its own report."
    )


def _said(groups: Sequence[comparison.Group], *, classifies: bool) -> dict[str, str]:
    """Return what is written above the pictures that compare groups."""
    alone, many = len(groups) == 1, len(groups) > group_plots.OVERLAID
    band = BAND if any(len(group.runs) > 1 for group in groups) else ""
    calibrated = (RELIABLE, RELIABLE_MANY) if classifies else (COVERS, COVERS_MANY)
    return {
        "curves": f"{MODELS_ALONE if alone else MODELS} {band}",
        "calibration": calibrated[many] + (f" {band}" if not many else ""),
        "selective": f"{SELECTIVE} {'' if many else IDEAL} {band}",
    }


def _tiles(run: Run) -> list[dict[str, str]]:
    """Return the few numbers that one run is judged by."""
    final, tiles = run.summary["final"], []
    for name, key in TILES.items():
        if key in final:
            group, _, metric = key.rpartition(".")
            clients = run.evaluation.get(group, {}).get("clients", [])
            around = half_width([one[metric] for one in clients if metric in one])
            about = "" if around is None else f"± {around:.4f} over clients"
            tiles.append({"name": name, "value": f"{final[key]['mean']:.4f}", "about": about})
    if worst := run.worst:
        value = worst["accuracy" if run.classifies else "rmse"]
        name = run.client(worst["client"])
        tiles.append({"name": "worst client", "value": f"{value:.4f}", "about": f"client {name}"})
    return tiles


def _tested(group: comparison.Group) -> list[Run]:
    return [run for run in group.runs if run.tested]


def _risk(group: comparison.Group) -> dict[str, Any]:
    found = [selective_risk(run.evaluation["personal"]["retention"]) for run in _tested(group)]
    area, excess = map(mean, zip(*found, strict=True))
    return {"run": group.label, "AURC": area, "above the best ranking": excess}


def _details(run: Run) -> dict[str, Any]:
    settings = run.experiment | {"environment": run.environment}
    return {
        "label": run.label,
        "sentence": _sentence(run),
        "unfinished": run.unfinished,
        "untested": run.untested[:LONGEST],
        "curves": [
            {"axis": plain(axis), "svg": plots.along(run, axis)}
            for axis in run.evaluation.get("curves", {})
        ],
        "classes": _table(_classes(run)),
        "confusion": plots.confusion(run) if _confusion_fits(run) else "",
        "clients": _clients(run),
        "dropped": _table(run.summary["dropped"][:LONGEST]),
        "coefficients": coefficients.section(run.path),
        "samples": samples.section(run),
        "settings": tomli_w.dumps(settings),
    }


def _landscape(run: Run) -> dict[str, Any]:
    from bflcore.report.landscape import landscape

    plane = landscape(run)
    return {
        "label": run.label,
        "client": run.client(plane.client),
        "networks": list(plane.marks),
        "svg": plots.contours(plane),
    }


def _sentence(run: Run) -> str:
    data = run.experiment["data"]
    model = run.experiment.get("model", {}).get("name", "")
    return plain(
        f"{run.summary['method']} on {Path(data['data']).name}, {data['clients']} clients "
        f"({data['partition']}), {model}, {run.summary['rounds']} rounds, "
        f"seed {run.experiment['seed']}, {run.summary['seconds']['total']:.0f} s"
    )


def _best(run: Run) -> dict[str, Any]:
    best = run.summary["best"]
    values = {
        key.removeprefix("personal.").replace("_", " "): value["mean"]
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


def _classes(run: Run) -> list[dict[str, Any]]:
    """Return a row per class, all clients' test samples pooled."""
    found = run.evaluation.get("personal", {}).get("classes", [])
    return [
        {"class": run.class_name(label), "examples": int(row["examples"])}
        | {name: row.get(name) for name in ("recall", "precision", "f1")}
        for label, row in enumerate(found)
    ]


def _confusion_fits(run: Run) -> bool:
    return 1 < len(run.evaluation.get("personal", {}).get("confusion", [])) <= plots.LEGIBLE


def _clients(run: Run) -> dict[str, Any]:
    """Return the table of clients, the worst first, with a bar for the metric that orders them."""
    key, sign = ("accuracy", 1) if run.classifies else ("rmse", -1)
    sizes = run.description.get("clients", [])
    foreign = {one["client"]: one for one in run.evaluation.get("ood", {}).get("clients", [])}
    clients = []
    for client in run.tested:
        number = client["client"]
        clients.append(dict(client, client=run.client(number)))
        if number < len(sizes):
            clients[-1]["trained on"] = sizes[number]["train"]
        if number in foreign:
            clients[-1]["OOD AUROC"] = foreign[number].get("auroc")
    # A metric that is undefined for a client is missing; a client without `key` comes last.
    clients.sort(key=lambda client: (key not in client, sign * client.get(key, 0)))
    finite = [client[key] for client in clients if math.isfinite(client.get(key, math.nan))]
    longest = max(finite, default=0) or 1.0
    names = ("accuracy", "rmse", "balanced_accuracy", "f1", "auroc", "nll", "ece", "brier", "nmse")
    possible = (*names, "coverage90", "OOD AUROC")
    shown = [name for name in possible if any(name in client for client in clients)]
    sized = ["trained on"] if any("trained on" in client for client in clients) else []
    columns = ["client", *sized, "examples", *shown]
    rows = [
        {
            "cells": [_number(client.get(name, "-")) for name in columns],
            "bar": _bar(client.get(key, 0) / longest),
        }
        for client in clients[:LONGEST]
    ]
    headings = ["tested on" if name == "examples" else name.replace("_", " ") for name in columns]
    return {"columns": headings, "rows": rows, "more": max(0, len(clients) - LONGEST)}


def _bar(share: float) -> int:
    """Return the pixels of a bar; none for a metric that is not finite."""
    return round(BAR * share) if math.isfinite(share) else 0


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else plain(value)


def _upright(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a table with a column per run, unless there are many."""
    if not 0 < len(rows) <= UPRIGHT:
        return _table(rows)
    return dict(zip(("columns", "rows"), turned(*grid(rows)), strict=True))


def _table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return dict(zip(("columns", "rows"), grid(rows), strict=True))
