"""``bfl report`` and ``bfl compare``: read run directories."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bflcore.errors import OptionError, RunError, unknown

if TYPE_CHECKING:
    from bflcore.report.reading import Run
    from bflcore.studies.comparison import Comparison
    from bflcore.studies.trials import Groups

    Row = dict[str, Any]

__all__ = ["commands"]

ENDINGS = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
RUNS = click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.command("report")
@RUNS
@click.option("--out", type=click.Path(path_type=Path), help="file to write")
@click.option(
    "--landscape", is_flag=True, help="additional plot of the loss on a plane of parameters"
)
def report(runs: tuple[Path, ...], out: Path | None, landscape: bool) -> None:
    """Write a self-contained report.html for one or several RUNS, finished or not.

    RUNS may be folders of sweeps, which stand for their finished runs.
    """
    from bflcore.report import write_report

    path = write_report(_expanded(runs), out, landscape=landscape, left_out=_left_out)
    click.echo(f"report: {path}")


def _expanded(paths: Sequence[Path]) -> list[Path]:
    """Return the runs that are meant, those of a study in its stead. Raises `RunError` if none."""
    from bflcore.studies.gathering import is_study, read_results

    found, reasons = list[Path](), list[str]()
    for path in paths:
        if not is_study(path):
            found.append(path)
            continue
        try:
            trials = read_results(path).trials
        except RunError as error:
            reasons.append(str(error))
            continue
        finished = [trial.path for trial in trials if trial.path and not trial.failure]
        found += finished
        if not finished:
            folder = shlex.quote(str(path.parent if path.is_file() else path))
            said = f"no run of {path} is finished; continue with: bfl sweep --resume {folder}"
            reasons.append(said)
        elif len(finished) < len(trials):
            missing = len(trials) - len(finished)
            reasons.append(f"{missing} of the {len(trials)} runs of {path}: not finished")
    if not found:
        raise RunError("; ".join(reasons))
    for reason in reasons:
        _left_out(reason)
    return found


@click.command("compare")
@RUNS
@click.option("--pooled", is_flag=True, help="metrics pooled over samples, not means over clients")
@click.option(
    "--against",
    metavar="RUN|CELL",
    help="run to compare with client by client, or cell of a sweep to compare with [default: the "
    "one of RUNS that shares nothing; the first cell]",
)
@click.option("--metric", metavar="NAMES", help="compare by these metrics, such as personal.nll")
@click.option(
    "--over",
    metavar="UNIT",
    help="what is paired: seeds, or clients (within seeds, where data and partition are equal) "
    "[default: seeds, clients where there is one seed]",
)
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    help="table, markdown, csv or latex [default: that of --out, or table]",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="file to write (.md, .csv, .tex, .txt or .json)"
)
@click.option("--json", "as_json", is_flag=True, help="JSON output")
def compare(
    runs: tuple[Path, ...],
    pooled: bool,
    against: str | None,
    metric: str | None,
    over: str | None,
    form: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print a table of the RUNS' latest metrics; unfinished runs are marked.

    RUNS may be folders of sweeps. These, and all runs with --metric, --over, --format or --out, are
    compared by cell: runs that differ by their seed alone. A row per metric and cell has mean and
    deviation over seeds and the paired difference to another cell with its confidence interval.
    """
    from bflcore.studies.gathering import is_study

    if as_json and form:
        raise OptionError("--json and --format exclude each other; give one of them")
    if as_json and out and out.suffix.lower() != ".json":
        raise OptionError(f"--json: {out} is not a file .json; rename it, or leave out --json")
    if metric or over or form or out or any(map(is_study, runs)):
        found = _compared(runs, against or "", metric or "", over or "", pooled=pooled)
        for cell in found.left_out:
            _left_out(f"{cell} has no finished run")
        _write_comparison(found, form, out, as_json=as_json)
        return
    if pooled and against:
        raise OptionError(
            "--against compares client by client, and --pooled has no clients; leave one of them "
            "out, or add --over seeds"
        )
    from bflcore.report.reading import read_run, read_runs, well_formed
    from bflcore.report.table import MEANING, print_table, row_of

    read = read_runs(runs, _left_out)
    statistic = "pooled" if pooled else "mean"
    alone = next((run for run in read if run.experiment.get("share") == "none"), None)
    base = read_run(Path(against)) if against else alone
    with well_formed(*read, *([base] if base else [])):
        rows = [row_of(run, statistic) for run in read]
        if base and not pooled:
            _add_paired(read, rows, base, required=against is not None)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    print_table(rows)
    click.echo(MEANING[statistic])
    if base and any("± se" in row for row in rows):
        click.echo(
            f"Paired difference to {base.label}: mean over clients ± its standard error (se)."
        )
    for run in read:
        if run.unfinished:
            click.echo(f"{run.label}: {run.unfinished}")
        if run.untested:
            click.echo(f"{run.label}: clients without test samples: {', '.join(run.untested)}")


def _compared(
    runs: Sequence[Path], against: str, metrics: str, over: str, *, pooled: bool
) -> Comparison:
    """Compare cells; `against` is a cell's name, or the folder of a run."""
    from bflcore.studies.comparison import compare
    from bflcore.studies.gathering import gather

    given = Path(against) if against else None
    is_run = given is not None and (given / "experiment.toml").is_file()
    folder = given.resolve() if given and is_run else None
    extra = [given] if given and folder not in {None, *(run.resolve() for run in runs)} else []
    found = gather([*runs, *extra], _left_out)
    if folder:
        against = _cell_of(folder, found.groups, against)
    names = [word.strip() for word in metrics.split(",") if word.strip()]
    statistic = "pooled" if pooled else "mean"
    return compare(found.groups, against, names, over, statistic, found.versions)


def _cell_of(folder: Path, groups: Groups, given: str) -> str:
    """Return the cell of a run. Raises `RunError` if it was left out."""
    for cell, trials in groups.items():
        if any(trial.path and trial.path.resolve() == folder for trial in trials):
            return cell
    raise RunError(f"--against: {given} is left out; give one of the cells: {', '.join(groups)}")


def _write_comparison(
    found: Comparison, form: str | None, out: Path | None, *, as_json: bool
) -> None:
    """Print a comparison, or write it to a file in the format of its ending."""
    from bflcore.files import write_text
    from bflcore.report.table import print_table
    from bflcore.studies.tables import FORMATS, comparison_rows, formatted

    chosen = form or (ENDINGS.get(out.suffix.lower(), "table") if out else "table")
    if chosen not in FORMATS:
        raise unknown("value of --format:", chosen, FORMATS)
    rows = comparison_rows(found, rounded=chosen != "csv")
    if as_json:
        text = json.dumps(found.as_json(), indent=2) + "\n"
    elif chosen == "table" and not out:
        print_table(rows)
        click.echo(found.meaning)
        return
    else:
        text = formatted(rows, chosen, found.meaning)
    if out:
        write_text(out, text, "--out: ")
        click.echo(f"written: {out}")
    else:
        click.echo(text, nl=False)


def _add_paired(read: list[Run], rows: list[Row], base: Run, *, required: bool) -> None:
    """Add, client by client, how each run differs from `base`; see `table.paired`.

    A run on other data is an error if `required`, and is left without these columns otherwise.
    """
    from bflcore.report.table import paired

    for run, row in zip(read, rows, strict=True):
        if run is base or run.path.resolve() == base.path.resolve():
            continue
        try:
            found = paired(run, base)
        except RunError:
            if required:
                raise
            continue
        row[f"worse than {base.label}"] = f"{found['worse']} of {found['clients']}"
        row["paired difference"] = found["difference"]
        row["± se"] = found["standard error"]


@click.command("coefficients")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--level", type=float, default=0.95, show_default=True, help="level of the credible intervals"
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="file to write (.csv, .parquet or .npz)"
)
@click.option("--json", "as_json", is_flag=True, help="JSON output")
def coefficients(run: Path, level: float, out: Path | None, as_json: bool) -> None:
    """Print the coefficients of RUN, a finished run of --model linear, with credible intervals.

    They are in the units of the data: the change of the log-odds, of the log rate or of the target
    per unit of a column, or of a category against the column's first one.
    """
    from bflcore.api.tables import check_table, write_table
    from bflcore.experiments.coefficients import read_coefficients
    from bflcore.report.coefficients import rows_of
    from bflcore.report.table import print_table

    if out:
        check_table(out)
    rows = rows_of(read_coefficients(run, level))
    if out:
        write_table(out, {name: [row[name] for row in rows] for name in rows[0]})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not out:
        print_table(rows)


def _left_out(reason: str) -> None:
    click.echo(f"left out: {reason}", err=True)


commands = (report, compare, coefficients)
