import math
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
    roc_auc_score,
    top_k_accuracy_score,
)

from bflcore.data.torchvision_import import torchvision
from bflcore.errors import DataError
from bflcore.problem import metrics

DOUBLE = torch.float64


@pytest.fixture
def reference():
    """torchmetrics' functions; it imports torchvision where that is installed."""
    with suppress(DataError):
        torchvision()
    return pytest.importorskip("torchmetrics.functional")


def predictions(samples=200, classes=10, draws=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(draws, samples, classes, generator=generator, dtype=DOUBLE)
    labels = torch.randint(classes, (samples,), generator=generator)
    return logits.softmax(-1), labels


def test_figures_equal_scikit_learns():
    p, y = predictions()
    found = metrics.metrics_of(metrics.classification_sums(p, y))
    mean = p.mean(0).numpy()
    assert found["accuracy"] == pytest.approx((mean.argmax(1) == y.numpy()).mean())
    assert found["nll"] == pytest.approx(log_loss(y, mean, labels=range(10)))
    assert found["top5"] == pytest.approx(top_k_accuracy_score(y, mean, k=5, labels=range(10)))
    one_hot = np.eye(10)[y.numpy()]
    assert found["brier"] == pytest.approx(np.square(mean - one_hot).sum(1).mean())
    entropy = stats.entropy(mean, axis=1) / math.log(10)
    assert found["entropy"] == pytest.approx(entropy.mean())


@pytest.mark.parametrize("bins", [10, 15])
def test_calibration_errors_equal_a_loop_over_bins(bins):
    p, y = predictions()
    found = metrics.metrics_of(metrics.classification_sums(p, y, bins))
    confidence, top = p.mean(0).max(1)
    gaps, weights = [], []
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            hits = (top == y)[inside].double().mean()
            gaps.append(abs(float(hits - confidence[inside].mean())))
            weights.append(float(inside.double().mean()))
    assert found["ece"] == pytest.approx(np.dot(gaps, weights))
    assert found["mce"] == pytest.approx(max(gaps))


def test_bins_are_closed_above():
    p = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [1.0, 0.0]]], dtype=DOUBLE)
    sums = metrics.classification_sums(p, torch.tensor([0, 0, 0]), bins=10)
    assert sums["bin_count"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1, 1]


def test_kwons_parts_add_up_to_the_covariance_of_the_predictive():
    p, y = predictions(50, 3, 6)
    sums = metrics.classification_sums(p, y)
    aleatoric = torch.stack([torch.diag_embed(d) - d[:, :, None] * d[:, None] for d in p]).mean(0)
    shift = p - p.mean(0)
    epistemic = (shift[:, :, :, None] * shift[:, :, None]).mean(0)
    trace = [float(m.diagonal(dim1=1, dim2=2).sum()) for m in (aleatoric, epistemic)]
    assert float(sums["aleatoric"]) == pytest.approx(trace[0])
    assert float(sums["epistemic"]) == pytest.approx(trace[1])
    whole = torch.diag_embed(p.mean(0)) - p.mean(0)[:, :, None] * p.mean(0)[:, None]
    assert sum(trace) == pytest.approx(float(whole.diagonal(dim1=1, dim2=2).sum()))


def test_a_single_draw_has_no_epistemic_part():
    p, y = predictions(draws=1)
    found = metrics.metrics_of(metrics.classification_sums(p, y))
    assert found["epistemic"] == pytest.approx(0, abs=1e-12)
    assert found["mutual_information"] == pytest.approx(0, abs=1e-12)


def test_a_closed_form_is_the_prediction_and_draws_divide_the_uncertainty():
    p, y = predictions(50, 6, 4)
    closed = predictions(50, 6, 1, seed=1)[0][0]
    found = metrics.metrics_of(metrics.classification_sums(p, y, closed_form=closed))
    predicted = metrics.metrics_of(metrics.classification_sums(closed[None], y))
    drawn = metrics.metrics_of(metrics.classification_sums(p, y))
    divided = {"aleatoric", "epistemic", "mutual_information"}
    for name, value in found.items():
        assert value == pytest.approx((drawn if name in divided else predicted)[name]), name
    assert found["epistemic"] > 0.01


@given(st.integers(1, 199), st.integers(0, 50))
def test_sums_over_parts_are_sums_over_the_whole(cut, seed):
    p, y = predictions(seed=seed)
    whole = metrics.classification_sums(p, y)
    parts = metrics.add(
        metrics.classification_sums(p[:, :cut], y[:cut]),
        metrics.classification_sums(p[:, cut:], y[cut:]),
    )
    assert metrics.metrics_of(parts) == pytest.approx(metrics.metrics_of(whole))


def test_summaries_tell_the_mean_over_clients_from_the_pooled_figure():
    right = torch.tensor([[[1.0, 0.0]]])
    many, one = right.expand(1, 3, 2), right
    summary = metrics.summarise(
        [
            metrics.classification_sums(many, torch.tensor([0, 0, 0])),
            metrics.classification_sums(one, torch.tensor([1])),
        ]
    )
    assert summary["accuracy"] == {"mean": 0.5, "std": 0.5, "pooled": 0.75}


def test_certain_mistakes_have_a_finite_nll():
    p = torch.tensor([[[1.0, 0.0]]])
    found = metrics.metrics_of(metrics.classification_sums(p, torch.tensor([1])))
    assert found["nll"] == pytest.approx(-math.log(1e-12))


def test_the_retention_curve_ends_at_the_accuracy_and_rises_when_uncertainty_is_informative():
    y = torch.zeros(100, dtype=torch.int64)
    sure = torch.tensor([0.99, 0.01], dtype=DOUBLE).expand(1, 60, 2)
    unsure = torch.tensor([0.45, 0.55], dtype=DOUBLE).expand(1, 40, 2)
    kept = metrics.retention_curve(metrics.classification_sums(torch.cat([sure, unsure], 1), y))
    assert kept == {"retained": [0.6, 1.0], "accuracy": [1.0, 0.6]}


def test_the_reliability_curve_of_empty_bins_is_zero():
    p, y = predictions(1)
    bins = metrics.reliability_diagram(metrics.classification_sums(p, y))
    assert sum(bins["count"]) == 1
    assert sum(v > 0 for v in bins["confidence"]) == 1


def test_regression_figures_equal_scipys():
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=(500, 2)), rng.uniform(0.5, 2, (500, 2))
    y = mean + np.sqrt(variance) * rng.normal(size=(500, 2))
    sums = [
        metrics.regression_sums(*(torch.tensor(a[part]) for a in (mean, variance, y)))
        for part in (slice(0, 123), slice(123, None))
    ]
    found = metrics.metrics_of(metrics.add(*sums))
    density = stats.norm(mean, np.sqrt(variance)).logpdf(y)
    assert found["nll"] == pytest.approx(-density.mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.square(y - mean).mean()))
    total = np.square(y - y.mean(0)).sum()
    assert found["nmse"] == pytest.approx(np.square(y - mean).sum() / total)
    assert found["coverage90"] == pytest.approx(0.9, abs=0.03)
    assert found["coverage50"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("bins", [10, 15])
def test_metrics_of_classes_equal_torchmetrics(reference, bins):
    p, y = predictions(500)
    mean, classes = p.mean(0), {"task": "multiclass", "num_classes": p.shape[2]}
    found = metrics.metrics_of(metrics.classification_sums(p, y, bins))
    expected = {
        "accuracy": reference.accuracy(mean, y, average="micro", **classes),
        "top5": reference.accuracy(mean, y, average="micro", top_k=5, **classes),
        "ece": reference.calibration_error(mean, y, n_bins=bins, norm="l1", **classes),
        "mce": reference.calibration_error(mean, y, n_bins=bins, norm="max", **classes),
    }
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-6
    )


def test_metrics_of_targets_equal_torchmetrics(reference):
    generator = torch.Generator().manual_seed(0)
    mean, targets = torch.randn(2, 80, 1, generator=generator, dtype=DOUBLE)
    found = metrics.metrics_of(metrics.regression_sums(mean, torch.ones_like(mean), targets))
    rmse = reference.mean_squared_error(mean, targets, squared=False)
    assert found["rmse"] == pytest.approx(float(rmse))
    # The mean squared error over the variance of the targets is 1 - R^2.
    assert found["nmse"] == pytest.approx(1 - float(reference.r2_score(mean, targets)))


def uneven(samples=300, classes=4, draws=3, seed=0):
    """Return predictions of which some are right, and labels of which class 2 is rare."""
    rng = np.random.default_rng(seed)
    labels = torch.tensor(rng.choice(classes, samples, p=[0.6, 0.25, 0.03, 0.12][:classes]))
    logits = torch.tensor(rng.normal(size=(draws, samples, classes)))
    logits += 2 * torch.nn.functional.one_hot(labels, classes)
    return logits.softmax(-1), labels


def test_metrics_over_classes_equal_scikit_learns():
    p, y = uneven()
    sums = metrics.classification_sums(p, y)
    found, top = metrics.metrics_of(sums), p.mean(0).argmax(1)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, top))
    assert found["f1"] == pytest.approx(f1_score(y, top, average="macro"))
    assert sums["confusion"].tolist() == confusion_matrix(y, top).tolist()
    exact = roc_auc_score(y, p.mean(0), multi_class="ovr", average="macro")
    assert found["auroc"] == pytest.approx(exact, abs=0.002)
    precision, recall, f1, support = precision_recall_fscore_support(y, top)
    for label, row in enumerate(metrics.class_metrics(sums)):
        expected = (support[label], recall[label], precision[label], f1[label])
        assert tuple(row.values()) == pytest.approx(expected)


def test_the_auroc_of_two_classes_is_the_binary_one():
    rng = np.random.default_rng(0)
    scores, y = rng.random(200), rng.random(200) < 0.4
    p = torch.tensor(np.stack([1 - scores, scores], 1))[None]
    found = metrics.metrics_of(metrics.classification_sums(p, torch.tensor(y).long()))
    assert found["auroc"] == pytest.approx(roc_auc_score(y, scores), abs=0.01)


def test_absent_classes_are_left_out_of_means_as_scikit_learn_leaves_them_out():
    p, y = uneven()
    kept = y != 2
    p, y = p[:, kept], y[kept]
    sums = metrics.classification_sums(p, y)
    found, top = metrics.metrics_of(sums), p.mean(0).argmax(1)
    assert found["balanced_accuracy"] == pytest.approx(
        np.mean([(top == y)[y == c].double().mean() for c in (0, 1, 3)])
    )
    assert found["f1"] == pytest.approx(f1_score(y, top, average="macro"))
    areas = [roc_auc_score(y == c, p.mean(0)[:, c]) for c in (0, 1, 3)]
    assert found["auroc"] == pytest.approx(np.mean(areas), abs=0.002)
    assert "recall" not in metrics.class_metrics(sums)[2]


def test_samples_of_one_class_have_no_auroc():
    p, _ = uneven(10)
    found = metrics.metrics_of(metrics.classification_sums(p, torch.ones(10, dtype=torch.int64)))
    assert "auroc" not in found
    assert found["balanced_accuracy"] == found["accuracy"]


def test_a_hundred_classes_take_kilobytes():
    p, y = predictions(300, 100, 2)
    sums = metrics.classification_sums(p, y)
    assert sum(t.nbytes for t in sums.values()) < 70_000
    areas = [roc_auc_score(y == c, p.mean(0)[:, c]) for c in y.unique()]
    assert metrics.metrics_of(sums)["auroc"] == pytest.approx(np.mean(areas), abs=0.01)


def test_sums_without_classes_are_smaller_and_lack_their_metrics():
    p, y = predictions()
    found = metrics.metrics_of(metrics.classification_sums(p, y, by_class=False))
    assert not {"auroc", "f1", "balanced_accuracy"} & set(found)
    assert found["accuracy"] == metrics.metrics_of(metrics.classification_sums(p, y))["accuracy"]


def test_a_log_density_replaces_the_gaussians():
    mean, y = torch.zeros(4, 1), torch.arange(4.0)[:, None]
    given = torch.tensor([[-1.0], [-2.0], [-3.0], [-6.0]])
    sums = metrics.regression_sums(mean, torch.ones_like(mean), y, given)
    assert metrics.metrics_of(sums)["nll"] == 3.0
    gaussian = metrics.regression_sums(mean, torch.ones_like(mean), y)
    assert {**sums, "nll": 0} == {**gaussian, "nll": 0}


def brute_force(errors):
    """Return the mean of the error among the first i of the sorted samples, over all i."""
    return float(np.mean(np.cumsum(errors) / np.arange(1, len(errors) + 1)))


def curve(errors):
    n = len(errors)
    kept = np.arange(1, n + 1)
    return {"retained": list(kept / n), "accuracy": list(1 - np.cumsum(errors) / kept)}


def test_the_area_of_many_samples_is_the_mean_risk_and_the_best_ranking_has_no_excess():
    rng = np.random.default_rng(0)
    errors = rng.random(20_000) < np.linspace(0, 0.5, 20_000)
    area, excess = metrics.selective_risk(curve(errors))
    assert area == pytest.approx(brute_force(errors), abs=1e-3)
    best, none = metrics.selective_risk(curve(np.sort(errors)))
    assert best == pytest.approx(brute_force(np.sort(errors)), abs=1e-3)
    assert none == pytest.approx(0, abs=1e-4)
    assert excess == pytest.approx(area - best, abs=1e-4)


def test_a_model_that_cannot_rank_has_its_error_as_area():
    assert metrics.selective_risk({"retained": [1.0], "accuracy": [0.7]})[0] == pytest.approx(0.3)
    assert metrics.selective_risk({"retained": [1.0], "accuracy": [0.0]}) == pytest.approx(
        (1.0, 0.0)
    )
    assert metrics.selective_risk({"retained": [0.5, 1.0], "accuracy": [1.0, 1.0]}) == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_ties_are_the_limit_of_errors_spread_evenly(levels):
    """Of each level's curve, the area by quadrature on a fine grid."""
    counts = np.array([count for count, _ in levels], float)
    wrong = np.array([min(count, bad) for count, bad in levels], float)
    kept, errors = np.cumsum(counts) / counts.sum(), np.cumsum(wrong) / counts.sum()
    given_curve = {"retained": list(kept), "accuracy": list(1 - errors / kept)}
    grid = (np.arange(20_000) + 0.5) / 20_000
    risk = np.interp(grid, [0, *kept], [0, *errors]) / grid
    area, excess = metrics.selective_risk(given_curve)
    assert area == pytest.approx(risk.mean(), abs=2e-3)
    rates = wrong / counts
    if all(a <= b for a, b in pairwise(rates)):
        assert excess >= -1e-9
    assert math.isfinite(excess)


def test_the_recorded_area_is_that_of_the_retention_curve_and_near_the_ranked_samples():
    p, y = uneven(4000, draws=1)
    sums = metrics.classification_sums(p, y)
    area = metrics.metrics_of(sums)["aurc"]
    assert area == metrics.selective_risk(metrics.retention_curve(sums))[0]
    order = stats.entropy(p[0].numpy(), axis=1).argsort()
    wrong = (p[0].argmax(1) != y).numpy()[order]
    assert area == pytest.approx(brute_force(wrong), abs=2e-3)


def test_the_area_of_counts_that_no_honest_client_sends_is_a_number():
    p, y = predictions(3)
    sums = metrics.classification_sums(p, y)
    sums["level_count"] = torch.zeros(100, dtype=DOUBLE)
    sums["level_count"][[0, 1, 2]] = torch.tensor([3.0, 1e-30, 5e-324], dtype=DOUBLE)
    sums["level_hits"] = torch.zeros(100, dtype=DOUBLE)
    assert metrics.metrics_of(sums)["aurc"] == pytest.approx(1)
