"""``bfl shift``: the benchmark from the command line."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from bfl_shift import settings
from bflcore.errors import RunError, unknown
from bflcore.lazy import lazy
from bflcore.studies.cells import seeds_of

benchmark: Any = lazy("bfl_shift.benchmark")
pages: Any = lazy("bfl_shift.page")
pictures: Any = lazy("bfl_shift.picture")
repeating: Any = lazy("bfl_shift.rerun")
shifts: Any = lazy("bfl_shift.shifts")
tables: Any = lazy("bfl_shift.table")

__all__ = ["shift"]

FILE = "bfl-shift"  # .json, .md and .svg in the folder
PUBLISHED = "published"  # the name of the table that the package has


@click.command("shift", context_settings={"max_content_width": 100})
@click.argument("methods", nargs=-1)
@click.option("--shifts", "names", default="", metavar="A,B", help="shifts [default: all]")
@click.option("--seeds", default="0-2", show_default=True, help="random seeds: 0-2 or 0,3,5")
@click.option("--setting", default="small", show_default=True, help="small or large")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/bfl-shift"),
    show_default=True,
    help="folder of the runs, the table and the page",
)
@click.option("--jobs", type=int, help="runs at a time [default: one per core]")
@click.option(
    "--table",
    "rivals",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a bfl-shift.json, or published, the results of this version: rank beside its methods, or "
    "check it",
)
@click.option("--check", type=float, metavar="FRACTION", help="run a fraction again, and compare")
@click.option("--list", "listing", is_flag=True, help="explain the shifts and settings, and stop")
def shift(
    methods: tuple[str, ...],
    names: str,
    seeds: str,
    setting: str,
    out: Path,
    jobs: int | None,
    rivals: Path | None,
    check: float | None,
    listing: bool,
) -> int:
    """Train METHODS (default: all that are installed), and score them under shift.

    The same command continues where it stopped; the exit status is 1 if a run failed. With --check
    0.1 a tenth of the runs of a table is trained again in a temporary folder; it is an error if the
    scores differ in any bit.
    """
    from bflcore.cli.execution import interruptible
    from bflcore.cli.sweep import show_standing

    if setting not in settings.SETTINGS:
        raise unknown("setting", setting, settings.SETTINGS)
    chosen = settings.SETTINGS[setting]
    if listing:
        _list()
        return 0
    if rivals == Path(PUBLISHED):
        rivals = tables.PUBLISHED
    if check is not None:
        with interruptible(lambda: "interrupted. A check keeps nothing; start it again"):
            _check(rivals or out / f"{FILE}.json", check, jobs)
        return 0
    other = tables.Table.read(rivals) if rivals else None
    picked, left_out = benchmark.chosen_methods(methods, chosen)
    asked = benchmark.Benchmark(
        chosen, picked, shifts.chosen_shifts(chosen, names), seeds_of(seeds), out
    )
    if other is not None:
        other.check_fits(chosen.name, [one.name for one in asked.shifts], asked.seeds)
    for method, reason in left_out.items():
        click.echo(f"left out: {method} {reason}")
    with (
        interruptible(lambda: "interrupted. Continue with the same command"),
        show_standing(out / "runs", silent=False) as progress,
    ):
        found = asked.execute(jobs, progress, partial(click.echo, err=True))
    command = _command(methods, names, seeds, setting)
    table = tables.table_of(asked, found, command)
    table.write(out / f"{FILE}.json")
    if other is not None:
        table = table.beside(other)
    _publish(table, out)
    return 1 if found.missing else 0


def _publish(table: Any, out: Path) -> None:
    """Write the page and its picture, and print the leaderboard."""
    from bflcore.cli.columns import columns
    from bflcore.files import write_text

    write_text(out / f"{FILE}.svg", pictures.draw(table))
    write_text(out / f"{FILE}.md", pages.page(table))
    for line in columns(pages.leaderboard(table), indent=""):
        click.echo(line)
    for training, method, seed, reason in table.missing:
        text = f"missing: {training}, {method}, seed {seed}: {reason.partition('; ')[0]}"
        click.echo(text, err=True)
    click.echo(f"page: {out / f'{FILE}.md'}")


def _check(path: Path, fraction: float, jobs: int | None) -> None:
    from bflcore.cli.sweep import show_standing

    table = tables.Table.read(path)
    with show_standing(Path("a temporary folder"), silent=False) as progress:
        found = repeating.rerun(table, fraction, jobs, progress, click.echo)
    if found.differing:
        raise RunError(
            f"--check: {len(found.differing)} of {found.records} records differ from {path}: "
            f"{'; '.join(found.differing[:5])}; scores are equal to the bit with the same versions "
            "on the same kind of processor alone"
        )
    click.echo(f"{found.runs} runs, {found.records} records: equal to the bit")


def _list() -> None:
    for one in settings.SETTINGS.values():
        click.echo(f"{one.name}: {one.summary}")
        for name, shift in shifts.shifts_of(one).items():
            click.echo(f"  {name:16s} {shift.summary} (training: {shift.training})")


def _command(methods: tuple[str, ...], names: str, seeds: str, setting: str) -> str:
    """Return the command that repeats the table."""
    words = ["bfl", "shift", *methods, *(("--shifts", names) if names else ())]
    return shlex.join([*words, "--seeds", seeds, "--setting", setting])
