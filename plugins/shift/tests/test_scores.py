"""Scores against scikit-learn and brute force."""

import itertools

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score, roc_curve

from bfl_shift.scores import (
    BETTER,
    Outcome,
    area_under_risk,
    auroc,
    false_positives,
    foreign_scores,
    joined,
    labelled_scores,
)


def outcome(count=40, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes), count)
    inside = rng.random((count, classes)) < 0.5
    rest = rng.random((3, count))
    return Outcome(p, rng.integers(classes, size=count), inside, *rest)


def test_labelled_scores_equal_those_of_scikit_learn():
    one = outcome()
    found = labelled_scores(one)
    hits = one.probabilities.argmax(1) == one.labels
    assert found["accuracy"] == pytest.approx(hits.mean())
    expected = log_loss(one.labels, one.probabilities, labels=range(4))
    assert found["nll"] == pytest.approx(expected)
    distance = (one.probabilities - np.eye(4)[one.labels]) ** 2
    assert found["brier"] == pytest.approx(distance.sum(1).mean())
    covered = [one.inside[i, label] for i, label in enumerate(one.labels)]
    assert found["coverage"] == pytest.approx(np.mean(covered))
    assert found["set_size"] == pytest.approx(one.inside.sum() / 40)
    assert found["epistemic"] == pytest.approx(one.epistemic.mean())


def test_the_calibration_error_equals_a_loop_over_bins():
    one = outcome(200)
    confidence, hits = one.probabilities.max(1), one.probabilities.argmax(1) == one.labels
    total = 0.0
    for k in range(10):
        among = (confidence > k / 10) & (confidence <= (k + 1) / 10)
        if among.any():
            total += among.sum() * abs(confidence[among].mean() - hits[among].mean())
    assert labelled_scores(one)["ece"] == pytest.approx(total / 200)


def test_the_area_under_the_risk_curve_equals_the_mean_over_all_orders_of_ties():
    confidence = np.array([0.9, 0.5, 0.5, 0.5, 0.7, 0.2, 0.2])
    wrong = np.array([0, 1, 0, 0, 1, 1, 0])
    areas = []
    for order in itertools.permutations(range(7)):
        chosen = np.array(order)
        if np.all(np.diff(confidence[chosen]) <= 0):
            risks = np.cumsum(wrong[chosen]) / np.arange(1, 8)
            areas.append(risks.mean())
    assert len(areas) == 12
    assert area_under_risk(confidence, wrong) == pytest.approx(np.mean(areas))


def test_the_area_under_the_risk_curve_rewards_errors_with_little_confidence():
    wrong = np.array([0, 0, 1])
    assert area_under_risk(np.array([3, 2, 1]), wrong) == pytest.approx(1 / 9)
    assert area_under_risk(np.array([1, 2, 3]), wrong) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.parametrize("decimals", [1, 6])  # with ties, and without
def test_the_area_under_the_roc_curve_equals_scikit_learns(decimals):
    rng = np.random.default_rng(1)
    own, foreign = (np.round(rng.normal(m, 1, 80), decimals) for m in (0, 0.7))
    expected = roc_auc_score([0] * 80 + [1] * 80, np.concatenate([own, foreign]))
    assert auroc(own, foreign) == pytest.approx(expected)


@pytest.mark.parametrize("decimals", [1, 6])
def test_false_positives_are_those_of_the_first_threshold_that_accepts_enough(decimals):
    rng = np.random.default_rng(2)
    own, foreign = (np.round(rng.normal(m, 1, 90), decimals) for m in (0, 2))
    # scikit-learn accepts what is not less: own samples are positive by their negative score.
    false, true, _ = roc_curve(
        [1] * 90 + [0] * 90, -np.concatenate([own, foreign]), drop_intermediate=False
    )
    assert false_positives(own, foreign) == pytest.approx(false[true >= 0.95 - 1e-12][0])


def test_twenty_own_samples_accept_nineteen():
    own = np.arange(20.0)
    assert false_positives(own, np.array([18.0, 18.5])) == 0.5


def test_foreign_samples_are_told_by_entropy_and_by_epistemic_uncertainty():
    own, foreign = outcome(seed=1), outcome(seed=2)
    found = foreign_scores(own, foreign)
    assert found["auroc"] == pytest.approx(auroc(own.entropy, foreign.entropy))
    assert found["auroc_epistemic"] == pytest.approx(auroc(own.epistemic, foreign.epistemic))
    assert found["aleatoric"] == pytest.approx(foreign.aleatoric.mean())
    assert "accuracy" not in found


def test_pooled_scores_are_those_of_all_samples_together():
    parts = [outcome(30, seed=seed) for seed in range(3)]
    pooled = labelled_scores(joined(parts))
    means = [labelled_scores(part) for part in parts]
    for name in ("accuracy", "nll", "brier", "coverage", "epistemic"):
        assert pooled[name] == pytest.approx(np.mean([one[name] for one in means]))
    assert pooled["ece"] != pytest.approx(np.mean([one["ece"] for one in means]))


def test_scores_that_rank_say_which_way_is_better():
    names = {*labelled_scores(outcome()), *foreign_scores(outcome(), outcome())}
    described = {"coverage", "set_size", "entropy", "epistemic", "aleatoric"}
    assert names - described == BETTER.keys() - {"worse_off"}
