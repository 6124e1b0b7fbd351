"""Ranks and their stability, on a table of known numbers and against scipy."""

import itertools

import attrs
import numpy as np
import pytest
from scipy import stats

from bfl_shift.ranks import (
    agreement,
    best_group,
    interval_of_ranks,
    likeness,
    overall,
    primary,
    ranks,
)
from bfl_shift.table import Record, Table

NLL = {  # by method: seeds 0, 1, 2
    "steady": (0.10, 0.20, 0.30),
    "close": (0.11, 0.19, 0.31),
    "behind": (0.50, 0.60, 0.70),
    "centralised": (0.01, 0.01, 0.01),
}
AUROC = {"steady": (0.7, 0.7, 0.6), "close": (0.9, 0.6, 0.7), "behind": (0.8, 0.8, 0.8)}


def table(shifts=None):
    shifts = shifts or {"reference": NLL, "blur": NLL, "ood-digits": AUROC}
    records = [
        Record(method, shift, seed, "", {"auroc" if shift.startswith("ood") else "nll": v}, {})
        for shift, methods in shifts.items()
        for method, values in methods.items()
        for seed, v in enumerate(values)
    ]
    return Table("", "toy", tuple(shifts), (0, 1, 2), tuple(records))


def test_small_losses_and_large_areas_are_best_and_pooled_data_are_not_ranked():
    found = ranks(table(), "blur")
    assert found == {
        "steady": {0: 1, 1: 2, 2: 1},
        "close": {0: 2, 1: 1, 2: 2},
        "behind": {0: 3, 1: 3, 2: 3},
    }
    assert ranks(table(), "ood-digits")["behind"] == {0: 2, 1: 1, 2: 1}
    assert (primary(table(), "blur"), primary(table(), "ood-digits")) == ("nll", "auroc")


def test_the_order_is_by_the_mean_rank_over_shifts_without_the_reference():
    found = overall(table())
    assert found["steady"] == {0: (1 + 3) / 2, 1: (2 + 2) / 2, 2: (1 + 3) / 2}
    assert list(found) == ["close", "steady", "behind"]
    assert "centralised" not in found


def test_a_method_without_a_rank_under_some_shift_has_no_place():
    shifts = {"blur": NLL, "ood-digits": {k: v for k, v in AUROC.items() if k != "close"}}
    assert "close" not in overall(table(shifts))


def test_a_method_whose_run_failed_is_last():
    partly = {**NLL, "close": NLL["close"][:2]}
    given = table({"blur": partly, "rotation": partly, "label-noise": NLL})
    failed = attrs.evolve(given, setting="small", missing=(("clean", "close", 2, "it diverged"),))
    assert ranks(failed, "blur")["close"] == {0: 2, 1: 1, 2: 3}
    assert ranks(failed, "blur")["behind"] == {0: 3, 1: 3, 2: 2}
    assert ranks(failed, "label-noise")["close"] == {0: 2, 1: 1, 2: 2}  # of another training
    assert overall(failed)["close"][2] == pytest.approx((3 + 3 + 2) / 3)
    assert ranks(given, "blur")["close"] == {0: 2, 1: 1}  # not run yet


def test_places_range_over_seeds():
    assert interval_of_ranks(ranks(table(), "blur")) == {
        "steady": (1, 2),
        "close": (1, 2),
        "behind": (3, 3),
    }


def test_agreement_counts_pairs_that_two_seeds_order_alike():
    rng = np.random.default_rng(0)
    places = {f"m{i}": dict(enumerate(rng.random(3))) for i in range(7)}
    taus = []
    for a, b in itertools.combinations(range(3), 2):
        signs = [
            np.sign((x[a] - y[a]) * (x[b] - y[b]))
            for x, y in itertools.combinations(places.values(), 2)
        ]
        taus.append(np.mean(signs))
    assert agreement(places) == pytest.approx(np.mean(taus))
    assert agreement({"a": {0: 1.0}, "b": {0: 2.0}}) is None
    assert agreement({"a": {0: 1.0, 1: 1.0}}) is None


def test_the_order_under_a_shift_is_compared_with_that_without():
    upside_down = {k: tuple(-x for x in v) for k, v in NLL.items()}
    given = table({"reference": NLL, "blur": NLL, "rotation": upside_down})
    assert likeness(given, "blur") == pytest.approx(1)
    assert likeness(given, "rotation") == pytest.approx(-1)
    assert likeness(table({"reference": {"a": (1.0,)}, "blur": {"a": (1.0,)}}), "blur") is None


def test_the_group_of_the_best_is_that_of_scipys_paired_interval():
    rng = np.random.default_rng(4)
    values = {f"m{i}": tuple(i / 20 + rng.normal(0, 0.05, 3)) for i in range(9)}
    means = {name: np.mean(v) for name, v in values.items()}
    best = min(means, key=means.get)
    near = set()
    for name in values.keys() - {best}:
        interval = stats.ttest_rel(values[name], values[best]).confidence_interval(0.95)
        if interval.low <= 0 <= interval.high:
            near.add(name)
    found = best_group(table({"blur": values}), "blur")
    assert found[0] == best
    assert set(found[1:]) == near
    assert 0 < len(near) < 8


def test_methods_whose_difference_from_the_best_varies_around_zero_are_in_its_group():
    assert best_group(table(), "blur") == ("steady", "close")  # behind by 0.40 at every seed
    assert best_group(table(), "ood-digits")[0] == "behind"


def test_a_method_that_lacks_a_seed_is_not_called_the_best():
    shifts = {"blur": {"whole": (0.5, 0.5, 0.5), "partly": (0.1,)}}
    assert best_group(table(shifts), "blur") == ("whole",)
