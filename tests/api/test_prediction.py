"""Predictions: uncertainty by definition, written out."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import bflcore
from bflcore.api.prediction import prediction_of
from bflcore.problem.calibration.base import answer, fit
from bflcore.problem.calibration.conformal import Conformal
from bflcore.problem.calibration.outliers import Outliers
from bflcore.problem.calibration.temperature import Temperature
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


def calibrated(parts, y, *calibrators, **options):
    """Return a prediction whose calibration samples are the predicted ones, with targets `y`."""
    chosen = calibrators or (Temperature(), Conformal(**options), Outliers())
    joined = prediction_of(parts, (), None).made
    total = answer(chosen, [(joined, y)]) | {"answered": torch.tensor([0])}
    return prediction_of(parts, ("a", "b", "c"), None, fit(chosen, 0, {}, total))


def halves(b=60, c=3):
    probabilities = draws(1, 4, b, c).softmax(-1)
    return [Predictive(probabilities[:, :, : b // 2]), Predictive(probabilities[:, :, b // 2 :])]


def test_sets_are_named_the_most_probable_class_first():
    prediction = calibrated(halves(), torch.arange(60) % 3)
    inside, sets = prediction.contains(0.8), prediction.set(0.8)
    assert inside.shape == (60, 3)
    assert inside.dtype == torch.bool
    for row, names in enumerate(sets):
        ranked = prediction.probabilities[row].argsort(descending=True).tolist()
        assert names == ["abc"[label] for label in ranked if inside[row, label]]
        assert names[0] == prediction.names[row]
    assert prediction.calibrated_by == ("temperature", "conformal", "ood")


def test_a_table_of_a_calibrated_prediction_has_sets_and_flags():
    prediction = calibrated(halves(), torch.arange(60) % 3)
    table = prediction.columns(0.8)
    assert list(table)[-3:] == ["set", "ood_score", "out_of_distribution"]
    assert table["set"] == ["|".join(names) for names in prediction.set(0.8)]
    assert prediction.columns()["set"] == ["|".join(names) for names in prediction.set(0.9)]
    assert {*table["out_of_distribution"]} <= {0, 1}
    assert table["ood_score"] == prediction.ood_score.tolist()
    real = [Predictive(draws(1, 4, 60, 1), torch.tensor(0.5))]
    columns = calibrated(real, draws(60, 1, seed=1)).columns(0.8)
    assert list(columns) == [
        *("mean", "std", "lower", "upper"),
        *("ood_score", "out_of_distribution"),
    ]


def test_without_calibration_sets_are_refused_in_one_line():
    for ask in (classes().set, lambda: classes().columns(0.9), classes().contains):
        with pytest.raises(bflcore.OptionError, match="--calibration-fraction 0.2") as error:
            ask()
        assert "\n" not in str(error.value)
    assert classes().out_of_distribution is None
    assert classes().calibrated_by == ()
    with pytest.raises(bflcore.OptionError, match="coverage: 90 is not allowed"):
        classes().set(90)


def test_too_few_calibration_samples_are_one_warning_and_everything_is_in():
    prediction = calibrated(halves(8), torch.arange(8) % 3)
    with pytest.warns(
        UserWarning, match="coverage 0.9 needs 9 client calibration samples .the scope"
    ):
        assert [sorted(names) for names in prediction.set(0.9)] == [["a", "b", "c"]] * 8
    prediction.set(0.8)  # enough: filterwarnings makes a warning an error


def test_conformal_intervals_are_rescaled_and_a_gaussian_is_the_fallback():
    parts, y = [Predictive(draws(1, 4, 60, 1), torch.tensor(0.5))], 3 * draws(60, 1, seed=1)
    scaling = Scaling((torch.zeros(1), torch.ones(1)), (torch.tensor([10.0]), torch.tensor([2.0])))
    total = answer([Conformal()], [(parts[0], y)]) | {"answered": torch.tensor([0])}
    fitted = fit([Conformal()], 0, {}, total)
    inside, outside = (prediction_of(parts, (), s, fitted) for s in (None, scaling))
    assert torch.allclose(outside.interval(0.8)[0], 10 + 2 * inside.interval(0.8)[0])
    covered = (inside.interval(0.8)[0] <= y) & (y <= inside.interval(0.8)[1])
    assert 0.8 <= float(covered.double().mean()) < 0.9
    scaled = calibrated(parts, y, Temperature())
    plain = prediction_of(parts, (), None)
    assert (scaled.std > 1.5 * plain.std).all()
    expected = stats.norm.interval(0.8, loc=scaled.mean, scale=scaled.std)
    assert np.allclose(scaled.interval(0.8)[0], expected[0])
