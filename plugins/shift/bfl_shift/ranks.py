"""Ranks of methods: by shift and overall, how stable they are, and which differences are none."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from scipy.stats import kendalltau, rankdata

from bfl_shift.scores import BETTER
from bfl_shift.settings import APART, SETTINGS
from bfl_shift.shifts import REFERENCE, shifts_of
from bfl_shift.table import Table
from bflcore.report.statistics import paired

__all__ = [
    "agreement",
    "best_group",
    "interval_of_ranks",
    "likeness",
    "overall",
    "primary",
    "ranks",
]

Ranks = dict[str, dict[int, float]]  # by method and seed


def primary(table: Table, shift: str) -> str:
    """Return the score that a shift is ranked by: a proper one, or AUROC for foreign samples."""
    return "auroc" if table.is_foreign(shift) else "nll"


def ranks(table: Table, shift: str) -> Ranks:
    """Return the rank of each method under a shift, seed by seed: 1 is best, ties share a rank.

    A method whose run failed is last. Methods that are not federated are left out.
    """
    score = primary(table, shift)
    found = {m: v for m, v in table.values(shift, score).items() if m not in APART}
    result: Ranks = {method: {} for method in found}
    for seed in table.seeds:
        have = [method for method in found if seed in found[method]]
        failed = [m for m, s in _failed(table, shift) if s == seed and m not in {*APART, *have}]
        places = rankdata([-BETTER[score] * found[method][seed] for method in have])
        last = [len(have) + len(failed)] * len(failed)
        for method, place in zip([*have, *failed], [*places, *last], strict=True):
            result.setdefault(method, {})[seed] = float(place)
    return result


def _failed(table: Table, shift: str) -> list[tuple[str, int]]:
    """Return the methods and seeds whose run for a shift failed."""
    if not table.missing:
        return []
    training = shifts_of(SETTINGS[table.setting])[shift].training
    return [(method, seed) for name, method, seed, _ in table.missing if name == training]


def overall(table: Table) -> Ranks:
    """Return the mean rank of each method over the shifts, seed by seed, the reference left out.

    Only where a method has a rank under every shift.
    """
    shifts = [name for name in table.shifts if name != REFERENCE] or [*table.shifts]
    found = [ranks(table, shift) for shift in shifts]
    methods = [method for method in found[0] if all(method in one for one in found)]
    means = {
        method: {
            seed: float(np.mean([one[method][seed] for one in found]))
            for seed in table.seeds
            if all(seed in one[method] for one in found)
        }
        for method in methods
    }
    kept = {method: values for method, values in means.items() if values}
    return dict(sorted(kept.items(), key=lambda item: (np.mean([*item[1].values()]), item[0])))


def interval_of_ranks(places: Ranks) -> dict[str, tuple[int, int]]:
    """Return each method's best and worst place over the seeds, by order of `places`."""
    found: dict[str, list[float]] = {method: [] for method in places}
    for seed in sorted({seed for values in places.values() for seed in values}):
        have = [method for method in places if seed in places[method]]
        order = rankdata([places[method][seed] for method in have], method="min")
        for method, place in zip(have, order, strict=True):
            found[method].append(place)
    return {method: (int(min(values)), int(max(values))) for method, values in found.items()}


def agreement(places: Ranks) -> float | None:
    """Return Kendall's tau-b between two seeds' ranks, mean over all pairs of seeds.

    1 if all seeds order the methods equally, 0 if one says nothing about another; None with fewer
    than two seeds or methods (Kendall 1945).
    """
    seeds = sorted({seed for values in places.values() for seed in values})
    found = []
    for first, second in combinations(seeds, 2):
        both = [v for v in places.values() if first in v and second in v]
        if len(both) > 1:
            tau = kendalltau([v[first] for v in both], [v[second] for v in both]).statistic
            found.append(float(tau))
    return float(np.mean(found)) if found and not any(map(math.isnan, found)) else None


def likeness(table: Table, shift: str) -> float | None:
    """Return Kendall's tau-b between the mean ranks without shift and those under a shift.

    None if there are fewer than two methods or all have the same rank.
    """
    before, under = (
        {method: float(np.mean([*values.values()])) for method, values in found.items() if values}
        for found in (ranks(table, REFERENCE), ranks(table, shift))
    )
    both = [method for method in before if method in under]
    if len(both) < 2:
        return None
    tau = float(kendalltau([before[m] for m in both], [under[m] for m in both]).statistic)
    return None if math.isnan(tau) else tau


def best_group(table: Table, shift: str) -> tuple[str, ...]:
    """Return the method with the best mean under a shift, then those not distinguishable from it.

    The 95 % interval of the paired difference (Student's t, a seed is the unit of replication)
    contains 0, or there are too few seeds for one.
    """
    score = primary(table, shift)
    found = {m: v for m, v in table.values(shift, score).items() if m not in APART}
    most = max(len(values) for values in found.values())
    whole = {method: values for method, values in found.items() if len(values) == most}
    means = {method: float(np.mean([*values.values()])) for method, values in whole.items()}
    order = sorted(means, key=lambda method: (-BETTER[score] * means[method], method))
    best, near = whole[order[0]], []
    for method in order[1:]:
        mine = whole[method]
        difference = paired([mine[seed] - best[seed] for seed in best if seed in mine])
        low, high = difference.low, difference.high
        if low is None or high is None or low <= 0 <= high:
            near.append(method)
    return order[0], *near
