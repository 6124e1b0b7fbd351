"""A reproduced table as a Markdown page, and as facts for its JSON record."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from bflcore.studies.evidence import Measured
from bflcore.studies.outcome import Compared, Reproduction
from bflcore.studies.paper_tables import Column, Rounds

__all__ = ["facts", "page"]

EXPLAINED = (
    "Values are those of the last round: mean ± standard deviation over seeds. *Difference* is "
    "ours minus the paper's. The papers give no deviation over seeds, so small differences say "
    "nothing."
)


def page(found: Reproduction) -> str:
    """Return a page: exceptions first, then every column that was run, then what was not."""
    table = found.table
    lines = [f"# {table.name}: {table.title.lower()}", "", f"*{table.source}*", ""]
    lines += ["```", found.command, "```", "", *_protocol(found), *_exceptions(found)]
    if found.claims:
        lines += _claims(found)
    for column in table.columns:
        lines += _column(found, column)
    lines += [*_not_here(found), *_settings(found), *_places(found)]
    return "\n".join(lines).rstrip() + "\n"


def facts(found: Reproduction) -> dict[str, Any]:
    """Return what the page says, as plain values."""
    return {
        "table": found.table.name,
        "source": found.table.source,
        "command": found.command,
        "cells": [_fact(one) for one in found.cells],
        "claims": [
            {
                "claim": one.claim.text,
                "verdict": one.verdict,
                "difference": one.difference,
                "half width": one.half_width,
                "seeds": one.seeds,
            }
            for one in found.claims
        ],
        "failures": dict(found.failures),
    }


def _fact(one: Compared) -> dict[str, Any]:
    planned = one.planned
    values = {
        "row": planned.row.name,
        "column": planned.column.name,
        "paper": one.paper,
        "other paper": one.other,
        "mean": one.mean,
        "deviation": one.deviation,
        "seeds": sorted(one.ours),
        "difference": one.difference,
        "rounds": planned.rounds if planned.cell else None,
        "cell": planned.cell.name if planned.cell else None,
        "stand-in": planned.stand_in,
        "not here": "" if planned.cell else planned.why,
        "stand-in because": planned.why if planned.cell else "",
        "note": planned.row.note(planned.column.name) if one.is_exception else "",
    }
    return {name: value for name, value in values.items() if value not in (None, "")}


def _protocol(found: Reproduction) -> Iterator[str]:
    table, protocol = found.table, found.table.protocol
    yield EXPLAINED
    yield ""
    differs = (f"Rounds: {_rounds(protocol.rounds)}.", *protocol.differs, *table.notes)
    yield "What differs from the paper's protocol:"
    yield ""
    yield from (f"* {text}" for text in differs)
    yield ""


def _rounds(rounds: Rounds) -> str:
    return f"{rounds.paper} in the paper, {rounds.here} here, chosen for time, unless a row says so"


def _exceptions(found: Reproduction) -> Iterator[str]:
    run = [one for one in found.cells if one.nearer is not None]
    if not run:
        return
    margins = sorted({one.planned.column.metric.margin for one in run})
    margin = " or ".join(f"{margin:g}" for margin in margins)
    yield "## Exceptions"
    yield ""
    if not found.exceptions:
        yield f"No cell that was run is worse than the nearer paper's by more than {margin}."
        yield ""
        return
    yield (
        f"{len(found.exceptions)} of the {len(run)} cells that were run are worse than the "
        f"(nearer) paper's by more than {margin}:"
    )
    yield ""
    for one in found.exceptions:
        planned, places = one.planned, one.planned.column.metric.places
        note = planned.row.note(planned.column.name)
        reasons = [note] if note else []
        if planned.stand_in:
            reasons.append(f"not the paper's data: {planned.stand_in}")
        paper, gap = one.nearer or 0.0, (one.mean or 0.0) - (one.nearer or 0.0)
        yield (
            f"* **{planned.row.name}, {planned.column.name}**: {number(one.mean, places)} against "
            f"{number(paper, places)} ({signed(gap, places)}). "
            f"{sentence('; '.join(reasons) or 'the reason is not known')}"
        )
    yield ""


def _claims(found: Reproduction) -> Iterator[str]:
    yield "## Claims"
    yield ""
    yield (
        "Differences are paired by seed, positive if as claimed, with the half-width of their 95 % "
        "interval (Student's t, the seed is the unit of replication). A difference whose interval "
        "contains 0 is not distinguishable."
    )
    yield ""
    yield from header("claim", "difference", "seeds", "verdict here")
    for one in found.claims:
        places = found.table.column(one.claim.column).metric.places
        gap = ""
        if one.difference is not None:
            gap = f"{signed(one.difference, places)} ± {number(one.half_width, places)}"
        yield line(one.claim.text, gap, str(one.seeds or ""), one.verdict)
    yield ""


def _column(found: Reproduction, column: Column) -> Iterator[str]:
    """Yield the section of a column, if any of its cells was run."""
    cells = [one for one in found.cells if one.planned.column == column]
    if not any(one.ours for one in cells):
        return
    places, other = column.metric.places, any(one.other is not None for one in cells)
    printed = any(one.paper is not None for one in cells)
    yield f"## {column.name}: {column.metric.title}"
    yield ""
    stand_ins = ((one.planned.stand_in, one.planned.why) for one in cells if one.planned.stand_in)
    for stand_in, why in dict.fromkeys(stand_ins):
        yield f"Not the paper's data, but {stand_in} ({why})."
        yield ""
    if printed and not all(one.planned.comparable for one in cells):
        yield "Nothing is compared with the printed numbers."
        yield ""
    if column.setting.says:
        yield column.setting.says
        yield ""
    heads = ["method", *(["paper"] if printed else []), *(["other paper"] if other else [])]
    heads += ["ours", *(["difference"] if printed else []), "seeds", "rounds"]
    yield from header(*heads)
    for one in cells:
        values = [one.planned.row.name]
        values += [number(one.paper, places, "n/a")] if printed else []
        values += [number(one.other, places)] if other else []
        values.append(_ours(one, places))
        values += [signed(one.difference, places)] if printed else []
        seeds = spans(sorted(one.ours))
        yield line(*values, seeds, str(one.planned.rounds) if one.ours else "")
    yield ""
    if other:
        against = found.table.against
        yield f"*Other paper*: the same method and data as {against} prints them."
        yield ""


def _ours(one: Compared, places: int) -> str:
    if one.mean is None:
        return "" if one.planned.cell is None else "not run"
    if one.deviation is None:
        return number(one.mean, places)
    return f"{number(one.mean, places)} ± {number(one.deviation, places)}"


def _not_here(found: Reproduction) -> Iterator[str]:
    """Yield the cells without numbers, with what would give them."""
    absent: dict[str, list[str]] = {}
    for one in found.cells:
        if one.planned.cell is None:
            absent.setdefault(one.planned.why, []).append(one.planned.column.name)
    due: dict[str, list[str]] = {column.name: [] for column in found.table.columns}
    for one in found.cells:
        if one.planned.cell is not None and one.missing and not one.ours:
            due[one.planned.column.name].append(one.planned.row.name)
    due = {name: rows for name, rows in due.items() if rows}
    if not absent and not due and not found.failures:
        return
    yield "## What was not run"
    yield ""
    for why, columns in absent.items():
        yield f"* {', '.join(dict.fromkeys(columns))}: {why}"
    for name, rows in due.items():
        command = f"{found.base} --only {shlex.quote(name)}"
        yield f"* {name}, {', '.join(rows)}: can be run here: `{command}`"
    for command, reason in found.failures.items():
        yield f"* failed: `{command}`: {reason}"
    yield ""


def _settings(found: Reproduction) -> Iterator[str]:
    """Yield the command of each cell that was run, and what departs from the paper in its row."""
    commands: dict[str, str] = {}
    for one in found.cells:
        if one.planned.cell and one.ours:
            commands[one.planned.cell.name] = one.planned.cell.command(min(one.ours))
    if not commands:
        return
    rows = {one.planned.row.name: one.planned.row.recipe for one in found.cells if one.ours}
    departures = [f"* {name}: {recipe.differs}." for name, recipe in rows.items() if recipe.differs]
    yield "## Settings"
    yield ""
    if departures:
        yield from [*departures, ""]
    yield "One command per cell; other seeds replace the last number."
    yield ""
    yield "```"
    yield from commands.values()
    yield "```"
    yield ""


def _places(found: Reproduction) -> Iterator[str]:
    """Yield the versions and machines of the runs, and what else the record holds."""
    record = f"`{found.table.name}.json`"
    if found.runs:
        seen = dict.fromkeys(f"{_machine(one)}; {_versions(one)}" for one in found.runs)
        seconds = sum(one.trial.seconds or 0 for one in found.runs)
        yield (
            f"{counted(len(found.runs), 'run')} of {seconds / 60:.0f} minutes in all "
            f"({'; '.join(seen)}). The metrics of every run are in {record}."
        )
    if trusted := sum(not one.settings for one in found.runs):
        yield (
            f"For {trusted} of them the record has the command alone, without a digest of all "
            "settings: a default that has changed since would not be noticed."
        )
    if found.kept:
        verb = "is" if found.kept == 1 else "are"
        yield f"{counted(found.kept, 'run')} of other settings {verb} kept in {record}."


def _machine(run: Measured) -> str:
    if not run.machine:
        return "a machine that was not recorded"
    return f"{run.machine.get('processor', '')}, {run.machine.get('cores', '')} cores"


def _versions(run: Measured) -> str:
    """Return the versions of Python, torch and bflcore, and of plugins that have another one."""
    installed = dict(run.versions.get("distributions", {}))
    core = installed.pop("bflcore", "")
    others = [f"{name} {version}" for name, version in installed.items() if version != core]
    named = [f"{name} {run.versions.get(name, '')}" for name in ("python", "torch")]
    plugins = f" and {counted(same, 'plugin')}" if (same := len(installed) - len(others)) else ""
    found = [named[0].capitalize(), named[1], *([f"bflcore{plugins} {core}"] if core else [])]
    return ", ".join([*found, *others])


def counted(number: int, what: str) -> str:
    """Return a number of things: ``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def sentence(text: str) -> str:
    """Return a text that begins like a sentence and ends like one."""
    return f"{text[:1].upper()}{text[1:]}."


def number(value: float | None, places: int, absent: str = "") -> str:
    """Return a number with a fixed number of places."""
    return absent if value is None else f"{value:.{places}f}"


def signed(value: float | None, places: int) -> str:
    """Return a difference with its sign."""
    return "" if value is None else f"{value:+.{places}f}"


def spans(seeds: list[int]) -> str:
    """Return seeds as they are given: ``0-4``, ``0, 2``."""
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def line(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def header(*cells: str) -> Iterable[str]:
    """Return the first two lines of a Markdown table."""
    return line(*cells), "|" + "---|" * len(cells)
