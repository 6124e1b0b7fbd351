"""The leaderboard as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bfl_shift.ranks import (
    agreement,
    best_group,
    interval_of_ranks,
    likeness,
    overall,
    primary,
    ranks,
)
from bfl_shift.settings import ALONE, APART, LEFT_OUT, SETTINGS
from bfl_shift.shifts import REFERENCE, shifts_of
from bfl_shift.table import FOREIGN, Table

__all__ = ["leaderboard", "page"]

NAMED = 12  # methods in one cell

COLUMNS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "aurc": "AURC",
    "auroc": "AUROC",
    "fpr95": "FPR95",
    "auroc_epistemic": "AUROC, epistemic",
    "coverage": "coverage",
    "set_size": "set size",
    "worse_off": "worse off",
    "entropy": "entropy",
    "epistemic": "epistemic",
    "aleatoric": "aleatoric",
}
SHOWN = (
    *("accuracy", "nll", "brier", "ece", "aurc", "coverage", "set_size", "worse_off"),
    *("epistemic", "aleatoric"),
)

MEANING = f"""\
Scores are means over clients, ± the standard deviation over seeds. *NLL* in nats; *Brier*: mean of
the squared distance to the label's indicator, over samples; *ECE* with 10 bins. *AURC*: area under
the risk-coverage curve, the error rate among the most confident samples, averaged over how many are
kept. *Coverage* and *set size* are those of conformal sets that promise 90 %, calibrated on samples
of the training distribution: under shift the promise does not hold, and the coverage says how far
off it is. *Worse off*: the share of clients that are less accurate than with `{ALONE}`, trained on
the same data alone (novel clients: alone for the epochs of one round, a low bar). *Epistemic* is
the variance of the probabilities over draws of the parameters, summed over classes, *aleatoric* the
mean over draws of 1 - sum p² (Kwon et al. 2020, eq. 4); the first is 0 for methods with a point
estimate. *AUROC* and *FPR95* tell foreign samples from the client's own by the entropy of the
prediction; *AUROC, epistemic* by epistemic uncertainty."""

RANKING = """\
Methods are ranked by NLL, or by AUROC where samples are foreign, seed by seed. *Mean rank* is the
mean over all shifts but the reference, then over seeds; *places* are the best and the worst place
in that order of any seed. In the tables below, a method in bold is not distinguishable from the
best: the 95 % interval of the paired difference contains 0. The unit of replication is a seed
(Student's t), and the intervals are not corrected for the number of methods. With three seeds such
an interval is wide: "not distinguishable" says that these runs do not tell, not that methods are
equal. A method whose run failed takes the last place under the shifts of that run."""

LIMITS = """\
This orders methods at one budget: {rounds} rounds, one network, {clients} clients that train, and
one strength of each shift. Methods whose defaults were chosen for more rounds are not at their best
in it, and a larger setting (`bfl shift --setting large`) may order them differently. The budget was
chosen for the time that it takes; neither a method nor the strength of a shift was chosen by the
results."""

SUBMIT = """\
## Add a method

Write it as a plugin (`bfl new-plugin NAME`), install it, and run it beside this table:

```
bfl shift NAME --table published
```

That trains it and `local`, asks their clients the same questions, and prints the leaderboard with
the new row. Every method runs with its own defaults; rounds, local epochs, network and data are
those of the setting. The form
[Submit to BFL-Shift](https://github.com/bflcore/bflcore/issues/new?template=shift.yml) says what to
send."""


def page(table: Table, picture: str = "bfl-shift.svg") -> str:
    """Return the page; `picture` is the name of the file beside it."""
    return "\n\n".join([*_head(table, picture), *_shifts(table), *_tail(table), SUBMIT]) + "\n"


def leaderboard(table: Table) -> list[list[str]]:
    """Return the rows of the leaderboard, the header first; bold marks nothing here."""
    places = overall(table)
    spread = interval_of_ranks(places)
    by_shift = {shift: ranks(table, shift) for shift in table.shifts}
    rows = [["place", "method", "mean rank", "places", *table.shifts]]
    for number, (method, means) in enumerate(places.items(), 1):
        best, worst = spread[method]
        each = [np.mean([*by_shift[s].get(method, {0: np.nan}).values()]) for s in table.shifts]
        rows.append(
            [
                str(number),
                method,
                f"{np.mean([*means.values()]):.1f}",
                str(best) if best == worst else f"{best} to {worst}",
                *(f"{place:.1f}" for place in each),
            ]
        )
    return rows


def _head(table: Table, picture: str) -> list[str]:
    setting = SETTINGS[table.setting]
    flags = {**setting.flags, **setting.options}
    said = ", ".join(f"{name}={value}" for name, value in flags.items())
    board = [[_code(cell) if i == 1 else cell for i, cell in enumerate(row)] for row in
             leaderboard(table)]  # fmt: skip
    board[0][1] = "method"
    tau = agreement(overall(table))
    stable = "" if tau is None else (
        f"Kendall's tau between the orders of two seeds, mean over pairs: {tau:.2f}."
    )  # fmt: skip
    return [
        "# BFL-Shift: uncertainty under federated shift",
        f"```\n{table.command}\n```",
        _facts(table, said),
        *table.notes,
        "## Leaderboard",
        RANKING,
        _table(board),
        stable,
        f"![Ranks of the methods under each shift]({picture})",
        "## Which order is stable",
        _stability(table),
        "## Do uncertainties rise?",
        _rises(table),
    ]


def _facts(table: Table, said: str) -> str:
    """Return what was run, where, and how long it took; `said` are the equal settings."""
    setting, machine = SETTINGS[table.setting], table.machine
    software = "; ".join(
        f"Python {one['python']}, torch {one['torch']}, bflcore {one['distributions']['bflcore']}"
        for one in table.versions
    )
    seeds = ", ".join(map(str, table.seeds))
    training = table.seconds["training"]
    minutes = {what: f"{sum(each.values()) / 60:.0f}" for what, each in table.seconds.items()}
    scoring = f" and scoring {minutes['scoring']}" if table.seconds["scoring"] else ""
    return (
        f"Setting `{setting.name}`: {setting.summary}. Equal for all methods: `{said}`. Everything "
        "else is each method's own default, [chosen on validation samples](defaults.md) where it "
        f"was searched for. Seeds {seeds}. {len(table.methods)} methods, "
        f"{len(table.records)} records; {len(training)} trainings took {minutes['training']} "
        f"minutes{scoring} of one process, on a machine that was busy with other work, too "
        f"({machine.get('processor')}, {machine.get('cores')} cores; {software}). Versions are "
        "those of the code at the time of the runs. All scores, also pooled over samples, are in "
        "the file bfl-shift.json."
    )


def _shifts(table: Table) -> list[str]:
    known = shifts_of(SETTINGS[table.setting])
    found = ["## Shift by shift", MEANING]
    for name in table.shifts:
        found += [f"### {name}", known[name].summary[0].upper() + known[name].summary[1:] + "."]
        found.append(_scores(table, name))
    return found


def _scores(table: Table, shift: str) -> str:
    """Return a table of all methods under a shift, the best first, those apart at the end."""
    foreign = table.is_foreign(shift)
    columns = FOREIGN if foreign else SHOWN
    near = set(best_group(table, shift))
    places = ranks(table, shift)
    order = sorted(places, key=lambda method: (np.mean([*places[method].values()]), method))
    order += [method for method in table.methods if method in APART]
    by_score = {name: table.values(shift, name) for name in columns}
    rows = [["method", "rank", *(COLUMNS[name] for name in columns)]]
    for method in order:
        cell = f"**{_code(method)}**" if method in near else _code(method)
        rank = f"{np.mean([*places[method].values()]):.1f}" if method in places else "-"
        values = [_spread(by_score[name].get(method, {})) for name in columns]
        if method in places or any(value != "-" for value in values):
            rows.append([cell, rank, *values])
    return _table(rows)


def _stability(table: Table) -> str:
    head = ["shift", "ranked by", "best", "not distinguishable from it", "tau of seeds"]
    rows = [[*head, "tau with the reference"]]
    for shift in table.shifts:
        best, *near = best_group(table, shift)
        taus = agreement(ranks(table, shift)), likeness(table, shift)
        rows.append(
            [
                shift,
                COLUMNS[primary(table, shift)],
                _code(best),
                _names(near) or "none",
                *("-" if tau is None else f"{tau:.2f}" for tau in taus),
            ]
        )
    return (
        "Kendall's tau is 1 for equal orders and 0 for unrelated ones. *Tau of seeds*: between the "
        "orders of two seeds under the shift, mean over pairs of seeds. *Tau with the reference*: "
        "between the order without shift and that under it, both by mean rank; where it is small, "
        f"a method's place without shift says little about its place under it.\n\n{_table(rows)}"
    )


def _rises(table: Table) -> str:
    """Return how uncertainties under each shift compare with the reference."""
    setting = SETTINGS[table.setting]
    shifts, rows = shifts_of(setting), [["shift", "epistemic", "rises in", "aleatoric", "rises in"]]
    for shift in table.shifts:
        data = setting.data_of(shifts[shift].training)
        if shift == REFERENCE or data != setting.flags["data"]:
            continue
        cells = [shift]
        for name in ("epistemic", "aleatoric"):
            ratios = _ratios(table.values(shift, name), table.values(REFERENCE, name))
            middle = f"x {np.median(ratios):.2f}" if ratios else "-"
            cells += [middle, f"{sum(r > 1 for r in ratios)} of {len(ratios)}"]
        rows.append(cells)
    return (
        "Mean uncertainty under the shift over that without it (means over clients and seeds): the "
        "median over methods, and in how many methods it rises. Epistemic uncertainty should rise "
        "where samples are foreign or clients know little, aleatoric uncertainty where labels are "
        "noisy. Methods with a point estimate have no epistemic uncertainty and are left out of it."
        f"\n\n{_table(rows)}"
    )


def _ratios(
    shifted: Mapping[str, Mapping[int, float]], before: Mapping[str, Mapping[int, float]]
) -> list[float]:
    found = []
    for method, values in shifted.items():
        old = np.mean([*before.get(method, {0: 0.0}).values()])
        if old > 1e-6 and method not in APART:  # rounding is no uncertainty
            found.append(float(np.mean([*values.values()]) / old))
    return found


def _tail(table: Table) -> list[str]:
    apart = [f"`{name}` {why}" for name, why in {**APART, **LEFT_OUT}.items()]
    flags = SETTINGS[table.setting].flags
    clients = flags["clients"] - flags["novel_clients"]
    found = ["## Limits", LIMITS.format(rounds=flags["rounds"], clients=clients)]
    found += [f"Equal to the bit under every shift: {_names(group)}." for group in table.equal]
    found += ["## What is left out", "; ".join(apart) + "."]
    if table.missing:
        rows = [["training", "method", "seed", "reason"]]
        rows += [[t, _code(m), str(s), why.partition("; ")[0]] for t, m, s, why in table.missing]
        found += ["Runs without a score:", _table(rows)]
    else:
        found.append("No run is missing.")
    return found


def _spread(values: Mapping[int, float]) -> str:
    if not values:
        return "-"
    mean = np.mean([*values.values()])
    if len(values) < 2:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {np.std([*values.values()], ddof=1):.3f}"


def _names(methods: Sequence[str]) -> str:
    more = f" and {len(methods) - NAMED} more" if len(methods) > NAMED else ""
    return ", ".join(map(_code, methods[:NAMED])) + more


def _code(name: str) -> str:
    return f"`{name}`"


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
