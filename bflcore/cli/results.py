"""``bfl report`` and ``bfl compare``: read run directories."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["commands"]

RUNS = click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.command("report")
@RUNS
@click.option("--out", type=click.Path(path_type=Path), help="file to write")
@click.option(
    "--landscape", is_flag=True, help="additional plot of the loss on a plane of parameters"
)
def report(runs: tuple[Path, ...], out: Path | None, landscape: bool) -> None:
    """Write a self-contained report.html for one or several RUNS."""
    from bflcore.report import write_report

    click.echo(f"report: {write_report(runs, out, landscape=landscape)}")


@click.command("compare")
@RUNS
@click.option("--json", "as_json", is_flag=True, help="JSON output")
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Print a table of the RUNS' final metrics."""
    from bflcore.report import compare_runs, print_table

    rows = compare_runs(runs)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_table(rows)


commands = (report, compare)
