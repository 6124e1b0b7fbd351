"""Predictions: uncertainty by definition, written out."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import bflcore
from bflcore.api.prediction import prediction_of
from bflcore.problem.likelihoods import Predictive
from bflcore.problem.scaling import Scaling


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(s=4, b=5, c=3):
    return prediction_of([Predictive(draws(1, s, b, c).softmax(-1))], ("a", "b", "c"), None)


def test_the_kinds_of_uncertainty_are_their_definitions_sample_by_sample():
    prediction = classes()
    for b in range(5):
        p = [np.asarray(prediction.draws[s, b], float) for s in range(4)]
        mean = sum(p) / 4
        assert np.allclose(prediction.probabilities[b], mean)
        assert math.isclose(prediction.entropy[b], stats.entropy(mean) / math.log(3), abs_tol=1e-6)
        information = stats.entropy(mean) - sum(map(stats.entropy, p)) / 4
        assert math.isclose(prediction.mutual_information[b], information, abs_tol=1e-6)
        epistemic = np.trace(sum(np.outer(q - mean, q - mean) for q in p) / 4)
        aleatoric = np.trace(sum(np.diag(q) - np.outer(q, q) for q in p) / 4)
        assert math.isclose(prediction.epistemic[b], epistemic, abs_tol=1e-7)
        assert math.isclose(prediction.aleatoric[b], aleatoric, abs_tol=1e-7)
    assert prediction.names == ["abc"[int(label)] for label in prediction.labels]


def test_a_closed_form_is_the_prediction():
    closed = torch.full((1, 5, 3), 1 / 3)
    given = Predictive(draws(1, 4, 5, 3).softmax(-1), closed_form=closed)
    prediction = prediction_of([given], ("a", "b", "c"), None)
    assert torch.allclose(prediction.entropy, torch.ones(5, dtype=torch.float64))


def test_blocks_are_joined_in_order_whatever_form_their_noise_has():
    whole = draws(1, 4, 7, 2)
    for noise in (torch.tensor(0.3), torch.tensor([[0.3]]), torch.full((1, 7, 2), 0.3)):
        blocks = [
            Predictive(whole[:, :, rows], noise[:, rows] if noise.ndim == 3 else noise)
            for rows in (slice(0, 3), slice(3, 7))
        ]
        found = prediction_of(blocks, (), None)
        assert torch.equal(found.draws, whole[0])
        assert torch.allclose(found.aleatoric, torch.full((7, 2), 0.3))


def test_targets_come_back_in_their_units():
    scaling = Scaling((torch.zeros(1), torch.ones(1)), (torch.tensor([10.0]), torch.tensor([2.0])))
    inside = prediction_of([Predictive(draws(1, 4, 5, 1), torch.tensor(0.5))], (), None)
    outside = prediction_of([Predictive(draws(1, 4, 5, 1), torch.tensor(0.5))], (), scaling)
    assert torch.allclose(outside.mean, 10 + 2 * inside.mean)
    assert torch.allclose(outside.std, 2 * inside.std)
    lower, upper = outside.interval(0.8)
    expected = stats.norm.interval(0.8, loc=outside.mean, scale=outside.std)
    assert np.allclose(lower, expected[0])
    assert np.allclose(upper, expected[1])


@pytest.mark.parametrize("level", [0, 1, -0.1, 90])
def test_a_level_outside_0_and_1_is_refused(level):
    prediction = prediction_of([Predictive(draws(1, 4, 5, 1), torch.tensor(0.5))], (), None)
    with pytest.raises(bflcore.OptionError, match="level: .* is not allowed; allowed: above 0"):
        prediction.interval(level)


def test_a_table_has_a_row_per_sample():
    table = classes().columns()
    assert list(table) == [
        *("label", "probability_a", "probability_b", "probability_c"),
        *("entropy", "epistemic", "aleatoric"),
    ]
    assert {len(column) for column in table.values()} == {5}
    two = prediction_of([Predictive(draws(1, 4, 5, 2), torch.tensor(0.5))], (), None).columns()
    assert list(two)[:5] == ["mean_0", "std_0", "lower_0", "upper_0", "mean_1"]
