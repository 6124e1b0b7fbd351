"""The comparison of runs: groups of seeds, intervals, and what is marked."""

from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from bflcore.report.comparison import by_settings, paired_difference, section
from bflcore.report.reading import Run

COSTS = {"seconds": {"total": 2.0}, "bytes": {"up": 1e6, "down": 3e6}}


def run_of(label, accuracy, seed=0, method="m", mark="same", **final):
    """Return a run whose clients have these accuracies."""
    clients = [{"client": i, "accuracy": a, "ece": 1 - a} for i, a in enumerate(accuracy)]
    known = {"personal.accuracy": accuracy, "personal.ece": [1 - a for a in accuracy]}
    values = {key: {"mean": float(np.mean(value))} for key, value in known.items()}
    return Run(
        Path(label),
        {"method": method, "rounds": 3, "seed": seed},
        [{"round": 3}],
        {"method": method, "rounds": 3, "final": values | final, **COSTS},
        {"personal": {"clients": clients}},
        {"fingerprints": {"the data or its partition": mark}},
    )


def column(found, name):
    return [row[found["columns"].index(name)] for row in found["rows"]]


def test_runs_that_differ_in_the_seed_alone_are_one_row_with_an_interval_over_seeds():
    a = [run_of(f"one-{s}", [0.8 + s / 50, 0.9], s, "a", mark=str(s)) for s in range(4)]
    b = [run_of(f"two-{s}", [0.5 + s / 50, 0.6], s, "b", mark=str(s)) for s in range(4)]
    found = section([*a, *b])
    assert [cell["text"] for cell in column(found, "run")] == ["one", "two"]
    assert [cell["text"] for cell in column(found, "seeds")] == ["4", "4"]
    cell = column(found, "accuracy")[0]
    means = [0.85 + s / 100 for s in range(4)]
    assert cell["text"] == f"{np.mean(means):.4f}"
    reach = scipy.stats.t.ppf(0.975, 3) * scipy.stats.sem(means)
    assert float(cell["around"]) == pytest.approx(reach, abs=1e-4)
    assert any("over seeds" in sentence for sentence in found["sentences"])
    assert not any("over clients" in sentence for sentence in found["sentences"])


def test_the_best_of_a_column_is_marked_by_its_direction():
    found = section([run_of("low", [0.1] * 3, method="a"), run_of("high", [0.9] * 3, method="b")])
    assert [cell["mark"] for cell in column(found, "accuracy")] == ["", "best"]
    assert [cell["mark"] for cell in column(found, "ECE")] == ["", "best"]
    assert [cell["mark"] for cell in column(found, "seconds")] == ["", ""]


def test_a_run_that_cannot_be_told_from_the_best_is_marked_so():
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 0.9, 10)
    runs = [
        run_of("best", base + 0.01, method="a"),
        run_of("equal", base + rng.normal(0, 0.05, 10), method="b"),
        run_of("worse", base - 0.01, method="c"),
    ]
    found = section(runs)
    # The last one differs by the same amount at every client, and the second one by noise.
    assert [cell["mark"] for cell in column(found, "accuracy")] == ["best", "equal", ""]


def test_a_paired_difference_is_that_of_the_differences():
    rng = np.random.default_rng(1)
    a, b = rng.uniform(size=8), rng.uniform(size=8)
    one, other = by_settings([run_of("a", a, method="a"), run_of("b", b, method="b")])
    truth = scipy.stats.t.interval(0.95, 7, np.mean(a - b), scipy.stats.sem(a - b))
    found = paired_difference(one, other, "personal.accuracy")
    assert (found.low, found.high) == pytest.approx(truth, abs=1e-4)


def test_clients_with_other_data_are_not_paired():
    runs = [run_of("a", [0.5, 0.6], method="a"), run_of("b", [0.5, 0.6], method="b", mark="other")]
    assert paired_difference(*by_settings(runs), "personal.accuracy") is None


def test_the_same_run_given_twice_is_two_rows():
    run = run_of("a", [0.5, 0.6])
    assert len(section([run, run])["rows"]) == 2


def test_one_run_is_not_compared():
    assert section([run_of("a", [0.5])])["rows"] == []


def test_a_metric_that_a_run_lacks_is_neither_shown_nor_best():
    ood = {"ood.auroc": {"mean": 0.7}}
    found = section(
        [
            run_of("a", [0.5, 0.6], method="a", **ood),
            run_of("b", [0.5, 0.7], method="b"),
        ]
    )
    assert [(c["text"], c["mark"]) for c in column(found, "OOD AUROC")] == [
        ("0.7000", ""),
        ("", ""),
    ]
