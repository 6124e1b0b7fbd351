"""report.html: one self-contained page, no request to anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import tomli_w

from bflcore.errors import RunError
from bflcore.report import plots
from bflcore.report.reading import Run, read_run
from bflcore.report.table import formatted, row_of

__all__ = ["write_report"]

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d9dee6; --paper: #fff;
  --tint: #f4f6f9; --bar: #0072B2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b2; --line: #343b48;
  --paper: #14181f; --tint: #1c222c; --bar: #56B4E9; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0 .8rem; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
.bar { display: inline-block; height: .6em; background: var(--bar); vertical-align: baseline; }
pre { background: var(--tint); padding: .8rem; overflow-x: auto; font-size: .85rem; }
"""


ALONG = (
    '<p class="soft">Personal models on test samples: mean over clients, and each client. The best '
    "value on test data is an oracle, no result.</p>"
)


def write_report(runs: Sequence[Path], out: Path | None = None, *, landscape: bool = False) -> Path:
    """Write the report of one run (into its folder) or of several (``report.html`` here).

    With `landscape` each run's loss is drawn on a plane of parameters, from its checkpoint.
    Raises `RunError` when a run cannot be read or the page cannot be written.
    """
    read = [read_run(path) for path in runs]
    if len({run.classifies for run in read}) > 1:
        raise RunError("classification and regression runs do not share a report; give one kind")
    target = out or (read[0].path / "report.html" if len(read) == 1 else Path("report.html"))
    drawn = [_landscape(run) for run in read] if landscape else []
    aside = target.with_name(f".{target.name}.writing")
    try:
        aside.write_text(_page(read, drawn), encoding="utf-8")
        aside.replace(target)
    except OSError as error:
        raise RunError(f"--out: {target} cannot be written ({error.strerror})") from None
    return target


def _page(runs: Sequence[Run], landscapes: Sequence[str] = ()) -> str:
    title = " vs ".join(run.label for run in runs)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{escape(_sentence(run))}</p>' for run in runs),
        "<h2>Final figures</h2>",
        _table([row_of(run) for run in runs]),
        "<h2>Best evaluated round</h2>",
        '<p class="soft">Chosen on test data: report the final figures, not these.</p>',
        _table([_best(run) for run in runs]),
        "<h2>Learning curves</h2>",
        _picture(plots.learning_curves(runs), "Figures over rounds; server's model dashed"),
    ]
    if runs[0].classifies:
        body += [
            "<h2>Calibration</h2>",
            '<p class="soft">Personal models, all clients pooled.</p>',
            _picture(plots.reliability(runs), "Reliability diagram and confidence histogram"),
            "<h2>Knowing what one does not know</h2>",
            '<p class="soft">Accuracy when the most uncertain samples are discarded.</p>',
            _picture(plots.retention(runs), "Accuracy against fraction retained"),
        ]
    for run in runs:
        for axis in run.evaluation.get("curves", {}):
            body += [
                f"<h2>Along {escape(axis)}, {escape(run.label)}</h2>",
                ALONG,
                _picture(plots.along(run, axis), f"Figures along {axis}"),
            ]
    body += landscapes
    for run in runs:
        body += [f"<h2>Clients of {escape(run.label)}</h2>", _clients(run)]
        if run.summary["dropped"]:
            body += ["<h2>Dropped</h2>", _table(run.summary["dropped"])]
    for run in runs:
        settings = (
            tomli_w.dumps(run.experiment) + "\n" + tomli_w.dumps({"environment": run.environment})
        )
        body.append(
            f"<details><summary>Settings of {escape(run.label)}</summary>"
            f"<pre>{escape(settings)}</pre></details>"
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _landscape(run: Run) -> str:
    from bflcore.report.landscape import landscape

    plane = landscape(run)
    return (
        f"<h2>Landscape of {escape(run.label)}</h2>"
        f'<p class="soft">Client {plane.client}, its test samples, on the plane through '
        f"{escape(', '.join(plane.marks))}.</p>"
        + _picture(plots.contours(plane), "Figures over a plane of parameters")
    )


def _sentence(run: Run) -> str:
    data = run.experiment["data"]
    model = run.experiment.get("model", {}).get("name", "")
    return (
        f"{run.summary['method']} on {data['data']}, {data['clients']} clients "
        f"({data['partition']}), {model}, {run.summary['rounds']} rounds, "
        f"seed {run.experiment['seed']}, {run.summary['seconds']['total']:.0f} s"
    )


def _best(run: Run) -> dict[str, Any]:
    best = run.summary["best"]
    keys = [key for key in best if isinstance(best[key], dict) and key.startswith("personal.")]
    figures = {key.removeprefix("personal."): f"{best[key]['mean']:.4f}" for key in keys}
    return {"run": run.label, "round": best["round"], **figures}


def _clients(run: Run) -> str:
    """List clients, the worst first, with a bar for the figure that orders them."""
    if "personal" not in run.evaluation:
        return "<p>No client could be evaluated.</p>"
    rows = [dict(client) for client in run.evaluation["personal"]["clients"]]
    key, sign = ("accuracy", 1) if run.classifies else ("rmse", -1)
    # What is undefined at a client is left out of its figures; without any it comes last.
    rows.sort(key=lambda row: (key not in row, sign * row.get(key, 0)))
    top = max(row.get(key, 0) for row in rows) or 1.0
    figures = ("accuracy", "rmse", "nll", "ece", "brier", "nmse", "coverage90")
    shown = ("client", "examples", *(k for k in figures if any(k in row for row in rows)))
    head = "".join(f"<th>{escape(name)}</th>" for name in (*shown, ""))
    lines = []
    for row in rows:
        values = [row.get(name, "-") for name in shown]
        cells = "".join(
            f"<td>{value:.4f}</td>" if isinstance(value, float) else f"<td>{value}</td>"
            for value in values
        )
        bar = f'<span class="bar" style="width:{90 * row.get(key, 0) / top:.0f}px"></span>'
        lines.append(f'<tr>{cells}<td style="text-align:left">{bar}</td></tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = [
        n
        for n in dict.fromkeys(k for row in rows for k in row)
        if any(row.get(n) is not None for row in rows)
    ]

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line((formatted(n, row.get(n)) for n in names), "td") for row in rows)
    return f'<div class="scroll"><table>{line(names, "th")}{body}</table></div>'


def _picture(svg: str, text: str) -> str:
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{escape(text)}"', 1)
    return f'<div class="scroll">{labelled}</div>'
