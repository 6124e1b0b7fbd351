"""Cells are compared by pairs: over seeds, or over clients of runs on the same data."""

import json
import math

import attrs
import pytest
from scipy import stats

from bflcore import OptionError, RunError
from bflcore.experiments.integrity import write_json
from bflcore.studies.comparison import compare

from .quick import results, trial

A, B, C = [0.50, 0.60, 0.55, 0.58], [0.53, 0.64, 0.57, 0.62], [0.51, 0.58, 0.57, 0.57]
VALUES = {"a": A, "b": B, "c": C}


def rows(found):
    return {row.cell: row for row in found.rows}


def test_differences_are_paired_over_seeds_and_p_values_adjusted_together():
    found = compare(results(VALUES).groups, metrics=["personal.accuracy"])
    assert (found.against, found.over) == ("a", "seeds")
    expected = {name: stats.ttest_rel(VALUES[name], A) for name in "bc"}
    ours = rows(found)
    for name, test in expected.items():
        interval = test.confidence_interval()
        assert ours[name].difference.low == pytest.approx(interval.low)
        assert ours[name].difference.high == pytest.approx(interval.high)
    smaller, larger = sorted(test.pvalue for test in expected.values())
    assert ours["b"].p == pytest.approx(min(1, 2 * smaller))
    assert ours["c"].p == pytest.approx(max(2 * smaller, larger))
    verdicts = [ours[name].verdict for name in "abc"]
    assert verdicts == ["baseline", "better", "not distinguishable"]
    assert "p is adjusted for 2 comparisons per metric (Holm)" in found.meaning
    assert "the unit of replication is the seed" in found.meaning


def test_what_is_better_depends_on_the_metric():
    found = compare(results({"a": A, "b": B}, "personal__nll").groups)
    assert rows(found)["b"].verdict == "worse"
    neither = compare(results({"a": A, "b": B}, "personal__entropy").groups)
    assert rows(neither)["b"].verdict == "differs"
    assert "Not distinguishable: the interval contains 0." in neither.meaning


def test_only_common_seeds_are_paired():
    longer = results({"a": A, "b": [*B, 0.9]})
    row = rows(compare(longer.groups))["b"]
    assert (row.n, row.difference.n) == (5, 4)
    assert row.difference.mean == pytest.approx(stats.tmean(B) - stats.tmean(A))
    apart = {"a": [trial("a", 0, x__nll=1.0)], "b": [trial("b", s, x__nll=1.0) for s in (1, 2)]}
    assert rows(compare(apart))["b"].verdict == "no pairs"
    one = {"a": [trial("a", 0, x__nll=1.0)], "b": [trial("b", s, x__nll=1.0) for s in (0, 2)]}
    assert rows(compare(one))["b"].verdict == "one pair: not known"


def test_p_values_are_adjusted_for_the_comparisons_that_were_made():
    """A cell without pairs, and one with a single pair, are not among them."""
    apart = {"d": [trial("d", 9, personal__accuracy=0.5)], "e": [trial("e", 0, personal__nll=1.0)]}
    one = {"f": [trial("f", 0, personal__accuracy=0.5)]}
    found = compare({**results(VALUES).groups, **apart, **one}, metrics=["personal.accuracy"])
    assert "p is adjusted for 2 comparisons per metric" in found.meaning
    alone = compare({**results({"a": A, "b": B}).groups, **apart, **one})
    assert "Not distinguishable: the interval contains 0." in alone.meaning
    nothing = compare({"a": results(VALUES).groups["a"], **apart})
    assert "istinguishable" not in nothing.meaning


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_run_that_diverged_is_not_left_out_in_silence(odd):
    row = rows(compare(results({"a": A, "b": [*B[:3], odd], "c": C}).groups))["b"]
    assert (row.n, row.p, row.verdict) == (4, None, "not finite")


def test_pooled_metrics_are_compared_as_such():
    row = rows(compare(results(VALUES).groups, "b", statistic="pooled"))["b"]
    assert row.mean == pytest.approx(stats.tmean(B) + 1)


CLIENTS = {("a", 0): [0.1, 0.2, 0.4], ("b", 0): [0.3, 0.3, 0.7], ("a", 1): [0.6, 0.5, 0.4, 0.5]}
CLIENTS |= {("b", 1): [0.7, 0.6, 0.3, 0.9]}


def written(tmp_path, marks=None):
    """Write what a comparison over clients reads of four runs; return them."""
    groups = {"a": [], "b": []}
    for (name, seed), values in CLIENTS.items():
        path = tmp_path / f"{name}{seed}"
        path.mkdir()
        mark = (marks or {}).get((name, seed), f"data {seed}")
        fingerprints = {"fingerprints": {"the data or its partition": mark}}
        write_json(path / "environment.json", fingerprints)
        clients = [{"client": i, "accuracy": v} for i, v in enumerate(values)]
        write_json(path / "evaluation.json", {"personal": {"clients": clients}})
        one = trial(name, seed, personal__accuracy=stats.tmean(values))
        groups[name].append(attrs.evolve(one, path=path))
    return groups


def test_clients_are_compared_within_seeds(tmp_path):
    found = compare(written(tmp_path), over="clients")
    first, second = (
        [y - x for x, y in zip(CLIENTS["a", seed], CLIENTS["b", seed], strict=True)]
        for seed in (0, 1)
    )
    expected = stats.ttest_ind(first, [-x for x in second], equal_var=False)
    row = rows(found)["b"]
    assert row.p == pytest.approx(expected.pvalue)
    assert 2 * row.difference.low == pytest.approx(expected.confidence_interval().low)
    assert row.difference.n == 7
    assert "the unit of replication is the client" in found.meaning


def test_seeds_on_other_data_are_not_compared_client_by_client(tmp_path):
    groups = written(tmp_path, {("b", 1): "other"})
    row = rows(compare(groups, over="clients"))["b"]
    expected = stats.ttest_rel(CLIENTS["b", 0], CLIENTS["a", 0])
    assert (row.difference.n, row.p) == (3, pytest.approx(expected.pvalue))
    (tmp_path / "all").mkdir()
    groups = written(tmp_path / "all", {("b", 0): "other", ("b", 1): "other"})
    assert rows(compare(groups, over="clients"))["b"].verdict == "no pairs"


def test_a_seed_with_a_single_pair_has_no_spread(tmp_path, monkeypatch):
    monkeypatch.setitem(CLIENTS, ("b", 1), [0.7])
    row = rows(compare(written(tmp_path), over="clients"))["b"]
    assert (row.difference.n, row.verdict) == (4, "a single pair in a seed: not known")


def test_runs_of_a_single_seed_are_compared_over_clients(tmp_path):
    groups = {name: trials[:1] for name, trials in written(tmp_path).items()}
    assert compare(groups).over == "clients"
    assert compare(groups, over="seeds").over == "seeds"


def test_runs_that_are_gone_are_compared_over_seeds_alone(tmp_path):
    groups = written(tmp_path)
    (tmp_path / "a1" / "evaluation.json").unlink()
    with pytest.raises(RunError, match="does not have the files that a run writes"):
        compare(groups, over="clients")
    with pytest.raises(RunError, match="clients are compared in the runs' own folders; use --over"):
        compare(results(VALUES).groups, over="clients")


def test_cells_without_a_finished_run_are_left_out_by_name():
    groups = {**results(VALUES).groups, "d": [attrs.evolve(trial("d", 0), failure="why")]}
    assert compare(groups).left_out == ("d",)
    with pytest.raises(RunError, match="no run is finished"):
        compare({"d": groups["d"]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"against": "x"}, "unknown cell of --against 'x'; allowed: a, b, c"),
        ({"over": "x"}, "unknown unit of --over 'x'; allowed: clients, seeds"),
        ({"metrics": ["x"]}, "unknown metric of --metric 'x'"),
        ({"over": "clients", "statistic": "pooled"}, "pooled metrics have no clients"),
    ],
)
def test_unknown_names_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        compare(results(VALUES).groups, **given)


def test_a_comparison_is_plain_values():
    found = json.loads(json.dumps(compare(results(VALUES).groups).as_json()))
    assert found["rows"][0]["verdict"] == "baseline"
    assert found["meaning"].startswith("Mean and deviation are over seeds.")
