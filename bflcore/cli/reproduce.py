"""``bfl reproduce``: a paper's table beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bflcore.studies.execution import Standing

__all__ = ["commands"]


@click.command("reproduce", context_settings={"max_content_width": 100})
@click.argument("table", required=False)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="rows or columns to run: a name, its beginning or a glob (repeatable)",
)
@click.option(
    "--seeds", metavar="LIST", help="random seeds, for example 0-4 [default: the table's]"
)
@click.option("--rounds", type=click.IntRange(1), help="number of rounds [default: the table's]")
@click.option("--paper", is_flag=True, help="the paper's number of rounds")
@click.option("--jobs", type=click.IntRange(1), help="runs at a time [default: one per core]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="folder for TABLE.md and TABLE.json, which is read first [default: runs/reproduce]",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="folder that keeps the run directories [default: runs/reproduce/runs]",
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="folder of the data sets")
@click.option("--download", is_flag=True, help="whether to download data sets that are absent")
@click.option(
    "--pages", is_flag=True, help="write the page of the runs that are known, run nothing"
)
@click.option("--json", "as_json", is_flag=True, help="JSON output")
def reproduce(
    table: str | None,
    only: tuple[str, ...],
    seeds: str | None,
    rounds: int | None,
    paper: bool,
    jobs: int | None,
    out: Path | None,
    runs: Path | None,
    data_dir: Path | None,
    download: bool,
    pages: bool,
    as_json: bool,
) -> None:
    """Run a paper's TABLE, or what is missing of it, and print ours beside the paper's.

    Without TABLE, list the tables and how many of their cells can be run with the data and the
    methods that are installed. TABLE may also be a file .toml of the same form.
    """
    from bflcore.studies.reproduce import FOLDER
    from bflcore.studies.reproduce import reproduce as run
    from bflcore.studies.results_page import facts, page

    if table is None:
        _list_tables(as_json=as_json)
        return
    folder = out or FOLDER
    found = run(
        table,
        only,
        seeds=seeds,
        rounds=rounds,
        paper=paper,
        jobs=jobs,
        out=folder,
        runs=runs,
        data_dir=data_dir,
        download=download,
        pages=pages,
        progress=_show,
    )
    if as_json:
        click.echo(json.dumps(facts(found), indent=2))
        return
    click.echo(page(found))
    click.echo(f"page: {folder / found.table.name}.md")


def _list_tables(*, as_json: bool) -> None:
    from bflcore.studies.reproduce import available_tables

    tables = available_tables()
    if as_json:
        listed = [
            {
                "table": one.table.name,
                "title": one.table.title,
                "source": one.table.source,
                "cells": one.cells,
                "runnable": one.here,
                "on stand-in data": one.stand_ins,
                "not here": one.reasons,
            }
            for one in tables
        ]
        click.echo(json.dumps(listed, indent=2))
        return
    for one in tables:
        click.echo(f"{one.table.name}  {one.table.title}")
        click.echo(f"    {one.table.source}")
        stand_ins = f" ({one.stand_ins} on stand-in data)" if one.stand_ins else ""
        click.echo(f"    {one.here} of {one.cells} cells can be run here{stand_ins}")
        for reason in one.reasons:
            click.echo(f"    {reason}")


def _show(standing: Standing) -> None:
    """Print one line per run that has ended."""
    if not standing.ended:
        return
    left = "" if standing.left is None else f", about {standing.left / 60:.0f} min left"
    failed = f" FAILED: {standing.reason}" if standing.reason else ""
    click.echo(f"{standing.done}/{standing.total} {standing.ended}{failed}{left}", err=True)


commands = (reproduce,)
