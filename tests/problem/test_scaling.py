"""Standardisation by sums over clients."""

import attrs
import numpy as np
import torch
from sklearn.preprocessing import StandardScaler

from bflcore import Map
from bflcore.data.sources import Boston
from bflcore.problem.scaling import Scaling, moments
from bflcore.testing import problems


def summed(parts):
    answers = [moments(*map(torch.as_tensor, part)) for part in parts]
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


def test_sums_over_clients_scale_as_scikit_learn_scales_pooled_samples():
    data = Boston().load()
    x, y = data.x[:300], data.y[:300]
    parts = [(x[:7], y[:7]), (x[7:8], y[7:8]), (x[8:8], y[8:8]), (x[8:], y[8:])]
    found = Scaling.of(summed(parts))(torch.as_tensor(data.x), torch.as_tensor(data.y))
    for scaled, table in zip(found, (data.x, data.y), strict=True):
        expected = StandardScaler().fit(table[:300].astype(np.float64)).transform(table)
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5, atol=1e-5)
        assert scaled.dtype == torch.float32


def test_labels_are_not_scaled():
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([2, 0, 1])
    assert Scaling.of(moments(x, y))(x, y)[1] is y


def test_a_constant_column_is_only_centred_whatever_rounding_leaves_of_its_variance():
    values = torch.rand(1, 400, generator=torch.Generator().manual_seed(0)) * 1e5
    x, y = values.repeat(1001, 1), torch.zeros(1001, dtype=torch.int64)
    sums = summed([(x[:1], y[:1])] * 1001)  # a sample per client
    naive = sums["scaling.x2"] / 1001 - (sums["scaling.x"] / 1001).square()
    assert (naive > 0).any()  # some columns would be divided by rounding errors
    scaled, _ = Scaling.of(sums)(x + 0.5, y)
    torch.testing.assert_close(scaled, torch.full_like(x, 0.5), rtol=0, atol=0.01)


def gaps(samples=300, seed=0):
    """Return a column of scale 1e5 and one of scale 1 with missing values, and two indicators."""
    rng = np.random.default_rng(seed)
    x = np.stack([1e5 + 3e4 * rng.normal(size=samples), rng.normal(size=samples)], 1)
    x[rng.random(x.shape) < 0.2] = np.nan
    return np.concatenate([x, rng.random((samples, 1)) < 0.1, np.zeros((samples, 1))], 1)


INDICATORS = torch.tensor([False, False, True, True])


def test_missing_values_are_left_out_of_the_sums_and_become_the_mean():
    x = gaps().astype(np.float32)
    y = np.zeros(len(x), np.int64)
    answers = [
        moments(torch.as_tensor(x[rows]), torch.as_tensor(y[rows]), INDICATORS)
        for rows in (slice(0, 1), slice(1, 7), slice(7, 7), slice(7, 300))
    ]
    sums = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    scaled = Scaling.of(sums, INDICATORS).features(torch.as_tensor(x)).numpy()
    pooled = x.astype(np.float64)[:, :2]
    expected = (pooled - np.nanmean(pooled, 0)) / np.nanstd(pooled, 0)
    np.testing.assert_allclose(scaled[:, :2], np.nan_to_num(expected), rtol=1e-4, atol=1e-5)
    assert scaled.dtype == np.float32


def test_indicators_stay_as_they_are_unless_no_training_sample_had_a_1():
    x = torch.as_tensor(gaps(), dtype=torch.float32)
    scaling = Scaling.of(moments(x, torch.zeros(300), INDICATORS), INDICATORS)
    new = torch.tensor([[float("nan"), 0, 1, 1], [1e5, 0, 0, 0]])
    assert scaling.features(new)[:, 2:].tolist() == [[1, 0], [0, 0]]
    assert scaling.features(x)[:, 2].equal(x[:, 2])


def test_a_column_of_missing_values_alone_becomes_0():
    x = torch.full((5, 1), float("nan"))
    sums = moments(x, torch.zeros(5), torch.tensor([False]))
    assert Scaling.of(sums, torch.tensor([False])).features(x).tolist() == [[0]] * 5


def test_without_moments_there_is_no_scaling():
    assert Scaling.of({"examples": torch.tensor(3)}) is None


def test_a_surveyed_problem_scales_what_clients_train_and_test_on_once():
    of = attrs.evolve(problems.separable(), standardise=True)
    found = problems.surveyed(problems.build(Map), of)
    pooled = torch.cat([of.train.of(client)[0] for client in of.clients])
    expected = (of.train.of(1)[0] - pooled.mean(0)) / pooled.std(0, correction=0)
    for twice in (found, found.surveyed(found.survey)):
        torch.testing.assert_close(twice.train.of(1)[0], expected)
        torch.testing.assert_close(twice.test.of(1)[0], expected)
        torch.testing.assert_close(twice.cohort([1], {}, 0).x[0], expected)
