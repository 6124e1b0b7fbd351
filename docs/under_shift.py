"""Write the tables "Under shift" of docs/methods from the record of BFL-Shift.

    python docs/under_shift.py

A page says which methods it is about, between ``<!-- under shift: METHOD ... -->`` and
``<!-- end of under shift -->``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bfl_shift.ranks import interval_of_ranks, overall
from bfl_shift.settings import APART
from bfl_shift.shifts import REFERENCE
from bfl_shift.table import Table
from bflcore.report.statistics import mean, paired

DOCS = Path(__file__).parent
AGAINST = "fedavg"
BLOCK = re.compile(
    r"<!-- under shift: (?P<methods>[\w\s-]+) -->\n.*?<!-- end of under shift -->\n", re.DOTALL
)


def read() -> Table:
    """Return the record."""
    return Table.read(DOCS / "results" / "bfl-shift.json")


def lacking(table: Table, method: str) -> list[str]:
    """Return the shifts under which a method lacks a score of some seed."""
    names = {shift: "auroc" if table.is_foreign(shift) else "nll" for shift in table.shifts}
    found = {shift: table.values(shift, name).get(method, {}) for shift, name in names.items()}
    return [shift for shift, values in found.items() if len(values) < len(table.seeds)]


def compared(table: Table, method: str, score: str, shifts: Sequence[str]) -> str:
    """Return a method's mean score over shifts and seeds, and the difference to `AGAINST`."""
    shifts = [shift for shift in shifts if shift not in lacking(table, method)]
    values = [table.values(shift, score) for shift in shifts]
    ours, theirs = (
        {seed: mean([found[name][seed] for found in values]) for seed in table.seeds}
        for name in (method, AGAINST)
    )
    centre = f"{mean([*ours.values()]):.3f}"
    if method == AGAINST:
        return centre
    found = paired([ours[seed] - theirs[seed] for seed in table.seeds])
    half = "" if found.high is None else f" ± {found.high - found.mean:.3f}"
    return f"{centre} ({found.mean:+.3f}{half})"


def row(table: Table, method: str) -> str:
    """Return a method's row: its place, and its scores without and under shift."""
    scores = overall(table)
    place = "not ranked"
    if method not in APART:
        best, worst = interval_of_ranks(scores)[method]
        place = f"{[*scores].index(method) + 1} ({best} to {worst})"
    labelled = [s for s in table.shifts if s != REFERENCE and not table.is_foreign(s)]
    foreign = [shift for shift in table.shifts if table.is_foreign(shift)]
    cells = [
        compared(table, method, "nll", [REFERENCE]),
        compared(table, method, "nll", labelled),
        compared(table, method, "auroc", foreign),
    ]
    return f"| `{method}` | {place} | {' | '.join(cells)} |"


def block(table: Table, methods: Sequence[str]) -> str:
    """Return the section about some methods."""
    count = len(overall(table))
    seeds = ", ".join(map(str, table.seeds))
    left = [
        f"`{method}`: without {', '.join(found)}, where its runs failed."
        for method in methods
        if (found := lacking(table, method))
    ]
    text = (
        f"[BFL-Shift](../results/bfl-shift.md), setting *{table.setting}*: MNIST-5k and digits, "
        "ten clients of five classes, 20 training samples per class, 20 rounds, each method's own "
        f"defaults, seeds {seeds}. In brackets is the difference to `{AGAINST}`, paired by seed, ± "
        f"half of its 95 % interval (Student's t over {len(table.seeds)} seeds, not corrected for "
        "the number of methods). *Place* is by mean rank over all shifts, with the best and the "
        "worst of a seed."
    )
    lines = [
        f"<!-- under shift: {' '.join(methods)} -->",
        *textwrap.wrap(text, 108, break_long_words=False, break_on_hyphens=False),
        "",
        f"| method | place of {count} | NLL, no shift | NLL, six shifts | AUROC, foreign data |",
        "|---|---|---|---|---|",
        *(row(table, method) for method in methods),
        *(["", *left] if left else []),
        "<!-- end of under shift -->",
    ]
    return "\n".join(lines) + "\n"


def renewed(text: str, table: Table) -> str:
    """Return a page with its section under shift as the record has it."""
    return BLOCK.sub(lambda found: block(table, found["methods"].split()), text)


if __name__ == "__main__":
    record = read()
    for page in sorted((DOCS / "methods").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(renewed(text, record), encoding="utf-8")
