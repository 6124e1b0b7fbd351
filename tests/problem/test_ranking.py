"""Areas under ROC curves from histograms, against scikit-learn's from the scores themselves."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from bflcore.problem import ranking


def scored(samples=400, seed=0, sharpness=3.0):
    """Return scores of which the positives' tend to be higher, and which samples are positive."""
    rng = np.random.default_rng(seed)
    positive = rng.random(samples) < 0.3
    scores = 1 / (1 + np.exp(-sharpness * (rng.normal(size=samples) + positive - 0.5)))
    return scores, positive


def counted(scores, positive, bins=ranking.FINEST):
    return ranking.histograms(
        torch.as_tensor(scores)[:, None], torch.as_tensor(positive)[:, None], bins
    )[0]


@pytest.mark.parametrize("bins", [16, 100])
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_the_area_is_within_the_resolution_of_scikit_learns(bins, sharpness):
    scores, positive = scored(sharpness=sharpness)
    counts = counted(scores, positive, bins)
    exact = roc_auc_score(positive, scores)
    bound = float(ranking.resolution(counts))
    assert float(ranking.auroc(counts)) == pytest.approx(exact, abs=bound)
    assert bound < (0.01 if (bins, sharpness) == (100, 3.0) else 0.3)


def test_the_area_is_exact_where_no_interval_holds_both_kinds():
    middles = torch.special.expit(ranking.borders(100) - 0.12)  # one score per interval
    positive = (torch.arange(99) * 7 % 11) < 4
    scores = middles.numpy().repeat(3)
    repeated = positive.numpy().repeat(3)
    exact = roc_auc_score(repeated, scores)
    found = float(ranking.auroc(counted(scores, repeated)))
    assert found == pytest.approx(exact, abs=1e-12)


def test_ties_count_half_and_scores_of_0_and_1_are_the_extremes():
    scores = [0.0, 1e-9, 1.0, 1 - 1e-9]
    assert float(ranking.auroc(counted(scores, [False, False, True, True]))) == 1
    assert float(ranking.auroc(counted(scores, [True, True, False, False]))) == 0
    assert float(ranking.auroc(counted([0.3, 0.3], [True, False]))) == 0.5


def test_one_kind_alone_has_no_area():
    assert ranking.auroc(counted([0.2, 0.4], [True, True])).isnan()


def test_scores_that_are_not_numbers_are_counted():
    counts = counted([float("nan"), 0.5], [True, False])
    assert int(counts.sum()) == 2


def test_histograms_of_parts_add_up():
    scores, positive = scored()
    parts = counted(scores[:123], positive[:123]) + counted(scores[123:], positive[123:])
    assert torch.equal(parts, counted(scores, positive))


def test_the_false_positive_rate_is_scikit_learns_at_a_border():
    scores, foreign = scored(2000)
    counts = counted(scores, foreign)
    # Accepting below a threshold: the client's own samples are the positives of scikit-learn.
    false, true, thresholds = roc_curve(~foreign, -scores, drop_intermediate=False)
    edges = torch.special.expit(ranking.borders(100)).numpy()
    accepted = [(scores[~foreign] <= edge).mean() for edge in edges]
    edge = edges[np.flatnonzero(np.array(accepted) >= 0.95)[0]]
    at = np.flatnonzero(-thresholds <= edge)[-1]
    assert float(ranking.fpr95(counts)) == pytest.approx(false[at])
    assert true[at] >= 0.95
    exact = false[np.flatnonzero(true >= 0.95)[0]]
    assert exact <= float(ranking.fpr95(counts)) <= exact + 0.1


def test_nineteen_of_twenty_are_ninety_five_per_cent():
    own = [0.1] * 19 + [0.9]
    counts = counted([*own, 0.5], [False] * 20 + [True])
    assert float(ranking.fpr95(counts)) == 0


def test_transposed_scores_are_counted_without_a_warning():
    scores, positive = torch.rand(3, 50).T, (torch.rand(3, 50) < 0.5).T
    with warnings.catch_warnings():  # torch warns once per process
        warnings.simplefilter("error")
        found = ranking.histograms(scores, positive, 20)
    copied = ranking.histograms(scores.contiguous(), positive.contiguous(), 20)
    assert torch.equal(found, copied)
