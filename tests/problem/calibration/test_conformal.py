import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from bflcore.problem.calibration import sketch
from bflcore.problem.calibration.conformal import Conformal, content_uniform
from bflcore.problem.likelihoods import Predictive


def predicted(count, classes=5, seed=0, sharpness=1.0):
    """Return probabilities that are wrong to a degree, as predictions, and labels."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(count, classes))
    p = scipy.special.softmax(logits, axis=1)
    labels = (p.cumsum(1) < rng.random((count, 1))).sum(1)
    shown = scipy.special.softmax(sharpness * logits + rng.normal(size=logits.shape), axis=1)
    return Predictive(torch.from_numpy(shown)[None, None]), torch.from_numpy(labels)


def real(count, seed=0):
    """Return Gaussian predictions whose errors are three times as large as they say; targets."""
    rng = np.random.default_rng(seed)
    draws = torch.from_numpy(rng.normal(size=(1, 3, count, 2)))
    mean, variance = draws[0].mean(0), draws[0].var(0, correction=0) + 0.5
    errors = torch.from_numpy(rng.standard_t(4, size=(count, 2)))
    return Predictive(draws, torch.tensor(0.5)), mean + 3 * errors * variance.sqrt()


def quantile(scores, coverage):
    """Return the conformal quantile of plain split conformal prediction."""
    k = math.ceil(coverage * (len(scores) + 1) - 1e-9)
    return np.inf if k > len(scores) else np.sort(scores)[k - 1]


def aps(p, label):
    """Return Romano et al.'s score by a loop: all more probable classes, and part of its own."""
    u = float(content_uniform(torch.from_numpy(p[None])))
    before = sum(other for other in p if other > p[label])
    return before + u * p[label]


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("count", [8, 50, 400])
def test_sets_are_those_of_plain_split_conformal_prediction(score, count):
    one = Conformal(score=score, empty=True)
    calibration, test = predicted(count), predicted(300, seed=1)
    p, labels = calibration[0].draws[0, 0].numpy(), calibration[1].numpy()
    fresh = test[0].draws[0, 0].numpy()
    of = {"lac": lambda row, label: 1 - row[label], "aps": aps}[score]
    q = quantile([of(row, label) for row, label in zip(p, labels, strict=True)], 0.9)
    scores = np.array([[of(row, label) for label in range(5)] for row in fresh])
    inside = one.region(one.sums(*calibration), test[0], 0.9).numpy()
    # A bin is at most 1.6 % of the odds wide: classes that near to the threshold may be added.
    odds, limit = scores / (1 - scores), q / (1 - q) if q < 1 else np.inf
    assert inside[scores <= q].all()
    assert not inside[odds > 1.016 * limit].any()
    assert (inside != (scores <= q)).mean() < 0.01


def test_intervals_are_those_of_plain_split_conformal_prediction():
    one = Conformal()
    (made, y), (fresh, _) = real(200), real(50, seed=1)
    mean, variance = (
        t.numpy() for t in (made.draws[0].mean(0), made.draws[0].var(0, correction=0))
    )
    scores = np.abs(y.numpy() - mean) / np.sqrt(variance + 0.5)
    q = np.array([quantile(column, 0.8) for column in scores.T])
    low, high = one.region(one.sums(made, y), fresh, 0.8)
    std = (fresh.draws[0].var(0, correction=0) + 0.5).sqrt().numpy()
    middle = fresh.draws[0].mean(0).numpy()
    assert (low + high).numpy() / 2 == pytest.approx(middle)
    reach = (high - low).numpy() / 2
    assert (reach >= q * std).all()
    assert (reach <= 1.016 * q * std).all()


@pytest.mark.parametrize("options", [{}, {"score": "aps"}, {"group": "label"}])
def test_exchangeable_samples_are_covered_as_promised(options):
    """The mean over 2,000 calibration sets of 30 samples; 0.9 * 31 = 27.9, so k = 28."""
    one = Conformal(empty=True, **options)
    count, classes = 30, 2
    made, y = predicted(2000 * (count + 1), classes, seed=3)
    y = torch.zeros_like(y) if options.get("group") == "label" else y  # enough samples per class
    covered = []
    for i in range(2000):
        rows = slice(i * (count + 1), (i + 1) * (count + 1) - 1)
        sums = one.sums(Predictive(made.draws[:, :, rows]), y[rows])
        new = slice(rows.stop, rows.stop + 1)
        inside = one.region(sums, Predictive(made.draws[:, :, new]), 0.9)
        covered.append(bool(inside[0, y[new]]))
    share, error = np.mean(covered), 4 * math.sqrt(0.09 / 2000)
    assert 0.9 - error < share < 28 / 31 + 0.02 + error


def test_the_coverage_of_many_samples_is_beta_distributed():
    """Vovk 2012: given 19 calibration samples and a coverage of 0.8, it is Beta(16, 4)."""
    one = Conformal(empty=True)
    made, y = predicted(200 * 19, seed=5)
    fresh, truth = predicted(4000, seed=6)
    shares = []
    for i in range(200):
        rows = slice(19 * i, 19 * (i + 1))
        sums = one.sums(Predictive(made.draws[:, :, rows]), y[rows])
        inside = one.region(sums, fresh, 0.8)
        shares.append(float(inside.gather(1, truth[:, None]).double().mean()))
    assert scipy.stats.kstest(shares, scipy.stats.beta(16, 4).cdf).pvalue > 0.001


def test_a_confidence_is_the_share_of_calibration_sets_that_reach_the_coverage():
    one = Conformal(empty=True, confidence=0.9)
    made, y = predicted(300 * 60, seed=5)
    fresh, truth = predicted(4000, seed=6)
    reached = 0
    for i in range(300):
        rows = slice(60 * i, 60 * (i + 1))
        sums = one.sums(Predictive(made.draws[:, :, rows]), y[rows])
        inside = one.region(sums, fresh, 0.8)
        reached += float(inside.gather(1, truth[:, None]).double().mean()) >= 0.8
    assert reached / 300 > 0.9 - 3 * math.sqrt(0.09 / 300)


def test_every_class_is_found_with_groups_by_label():
    made, y = predicted(3000)
    favoured = made.draws * torch.tensor([4.0, 1, 1, 1, 0.1])
    made = Predictive(favoured / favoured.sum(-1, keepdim=True))
    fresh = Predictive(made.draws[:, :, 1500:])
    found = {}
    for group in ("none", "label"):
        one = Conformal(group=group, empty=True)
        sums = one.sums(Predictive(made.draws[:, :, :1500]), y[:1500])
        inside = one.region(sums, fresh, 0.9)
        hits = inside.gather(1, y[1500:, None])[:, 0].double()
        found[group] = [float(hits[y[1500:] == label].mean()) for label in range(5)]
    assert min(found["none"]) < 0.8
    assert min(found["label"]) > 0.85


def test_groups_by_predicted_class_have_thresholds_of_their_own():
    made, y = predicted(600)
    one = Conformal(group="predicted", empty=True)
    inside = one.region(one.sums(made, y), made, 0.9)
    p = made.draws[0, 0].numpy()
    for label in range(5):
        rows = p.argmax(1) == label
        q = quantile(1 - p[rows, y.numpy()[rows]], 0.9)
        assert (inside.numpy()[rows] == (1 - p[rows] <= q)).mean() > 0.99


def test_a_set_has_the_most_probable_class_unless_it_may_be_empty():
    sure = torch.tensor([[[[0.99, 0.01]] * 50]]).double()
    sums = Conformal().sums(Predictive(sure), torch.zeros(50, dtype=torch.int64))
    unsure = Predictive(torch.tensor([[[[0.45, 0.55]]]]).double())
    assert Conformal().region(sums, unsure, 0.9).tolist() == [[False, True]]
    assert Conformal(empty=True).region(sums, unsure, 0.9).tolist() == [[False, False]]


def test_with_too_few_samples_everything_is_in_and_one_line_says_so():
    one = Conformal(scope="client")
    made, y = predicted(8)
    sums = one.sums(made, y)
    assert one.region(sums, made, 0.9).all()
    assert one.shortage(sums, 0.9) == (
        "coverage 0.9 needs 9 client calibration samples (the scope federated uses all clients'), "
        "there are 8: where they are too few, everything is in the set"
    )
    assert one.shortage(sums, 0.8) == ""
    low, high = one.region(one.sums(*real(8)), real(8)[0], 0.9)
    assert low.isinf().all()
    assert high.isinf().all()


def test_random_parts_are_uniform_and_the_same_for_the_same_sample():
    p = predicted(4000, seed=9)[0].draws[0, 0]
    drawn = content_uniform(p)
    assert scipy.stats.kstest(drawn.numpy(), "uniform").pvalue > 0.001
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert content_uniform(p[7:8]).equal(drawn[7:8])
    top = p.max(1).values.numpy()
    assert abs(scipy.stats.spearmanr(top, drawn.numpy()).statistic) < 0.05


def test_a_threshold_is_asked_of_the_histogram_whatever_the_coverage():
    made, y = predicted(200)
    sums = Conformal().sums(made, y)
    sizes = [int(Conformal().region(sums, made, c).sum()) for c in (0.5, 0.7, 0.9, 0.99)]
    assert sizes == sorted(sizes)
    assert sums["scores"].shape == (1, sketch.BINS)
