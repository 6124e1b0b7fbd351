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
@click.option("--download", is_flag=True, help="download data sets that are absent")
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
) -> int:
    """Run a paper's TABLE, or what is missing of it, and print ours beside the paper's.

    Without TABLE, list the tables and how many of their cells can be run with the data and the
    methods that are installed. TABLE may also be a file .toml of your own: the
    manual's page Files that you write has its keys. The same command
    continues what was interrupted or has failed.
    """
    from bflcore.cli.execution import interruptible
    from bflcore.cli.sweep import show_standing
    from bflcore.studies.reproduce import FOLDER
    from bflcore.studies.reproduce import reproduce as run
    from bflcore.studies.results_page import facts, page

    if table is None:
        _list_tables(as_json=as_json)
        return 0
    folder, kept, silent, failed = out or FOLDER, runs or FOLDER / "runs", as_json or pages, 0
    with (
        interruptible(lambda: "interrupted. Continue with the same command"),
        show_standing(kept, silent) as show,
    ):

        def progress(at: Standing) -> None:
            nonlocal failed
            failed = at.failed
            show(at)

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
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(facts(found), indent=2))
    else:
        click.echo(page(found))
        click.echo(f"page: {folder / found.table.name}.md")
    if failed:
        what = "1 run" if failed == 1 else f"{failed} runs"
        click.echo(f"{what} failed; the same command tries again", err=True)
    return 1 if failed else 0


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


commands = (reproduce,)
