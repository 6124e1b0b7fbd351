import math

import numpy as np
import pytest
import scipy.stats
import torch

from bflcore.problem.calibration import sketch

ONE = torch.zeros(1, dtype=torch.int64)


def scores(count, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.exp(rng.normal(size=count)))


def counts(values):
    return sketch.histogram(values, torch.zeros(len(values), dtype=torch.int64), 1)


@pytest.mark.parametrize("count", [1, 9, 19, 50, 199])
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_a_threshold_is_the_bin_of_the_smallest_score_that_is_high_enough(count, coverage):
    values = scores(count)
    k = math.ceil(coverage * (count + 1) - 1e-9)
    found = sketch.thresholds(counts(values), coverage)
    if k > count:
        assert found.tolist() == [sketch.BINS]
    else:
        assert found.equal(sketch.bins_of(values.sort()[0][k - 1 : k]))


def test_a_bin_ends_just_above_its_scores():
    values = torch.cat([scores(500), torch.tensor([1e-5, 1e5], dtype=torch.float64)])
    ends = sketch.upper_ends(sketch.bins_of(values))
    assert (ends >= values).all()
    assert (ends <= values * 1.016).all()
    extremes = torch.tensor([0.0, math.inf, math.nan, 1e-9, 1e9], dtype=torch.float64)
    assert sketch.bins_of(extremes).tolist() == [0, *[sketch.BINS - 1] * 2, 0, sketch.BINS - 1]
    assert sketch.upper_ends(torch.tensor([sketch.BINS - 1, sketch.BINS])).isinf().all()


def test_histograms_of_clients_add_up_to_that_of_all_samples():
    values, groups = scores(300), torch.arange(300) % 3
    parts = [sketch.histogram(values[i::7], groups[i::7], 3) for i in range(7)]
    assert sum(parts).equal(sketch.histogram(values, groups, 3))
    assert sketch.histogram(values, groups, 3).sum(1).tolist() == [100] * 3


def test_groups_have_thresholds_of_their_own():
    values = torch.cat([scores(50), 100 * scores(50)])
    groups = torch.arange(100) // 50
    found = sketch.thresholds(sketch.histogram(values, groups, 2), 0.9)
    alone = [sketch.thresholds(counts(part), 0.9) for part in (values[:50], values[50:])]
    assert found.equal(torch.cat(alone))


def test_weights_count_as_parts_of_a_sample():
    """Against the weighted quantile of Barber et al. 2023, eq. 10, by a plain loop."""
    own, others = scores(20), 3 * scores(200, seed=1)
    weight = 0.25
    bins = sketch.bins_of(torch.cat([own, others]))
    weights = [1.0] * 20 + [weight] * 200
    total = sum(weights) + 1
    reached, expected = 0.0, sketch.BINS
    for position, share in sorted(zip(bins.tolist(), weights, strict=True)):
        reached += share / total
        if reached >= 0.9:
            expected = position
            break
    assert sketch.thresholds(counts(own) + weight * counts(others), 0.9).tolist() == [expected]


@pytest.mark.parametrize("coverage", [0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("confidence", [0.0, 0.5, 0.95])
def test_needed_is_the_smallest_number_of_samples_with_a_threshold(coverage, confidence):
    least = sketch.needed(coverage, confidence)
    enough, fewer = (
        sketch.thresholds(counts(scores(n)), coverage, confidence) for n in (least, least - 1)
    )
    assert (enough < sketch.BINS).all()
    assert fewer.tolist() == [sketch.BINS]


@pytest.mark.parametrize("count", [40, 50, 500])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_a_confidence_is_the_probability_of_the_beta_distributed_coverage(count, confidence):
    values = scores(count)
    bins = sketch.thresholds(counts(values), 0.9, confidence)

    def sure(k):
        return scipy.stats.beta.sf(0.9, k, count + 1 - k)

    ranks = (k for k in range(1, count + 1) if sure(k) >= confidence)
    k = next(ranks, None)
    ordered = sketch.bins_of(values.sort()[0])
    assert bins.tolist() == [sketch.BINS if k is None else int(ordered[k - 1])]
