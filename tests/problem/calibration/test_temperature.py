import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch

from bflcore.problem.calibration.base import EXAMPLES, answer, probabilities
from bflcore.problem.calibration.temperature import Temperature
from bflcore.problem.likelihoods import Predictive

ONE = Temperature()


def predicted(sharpness, count=300, classes=5, seed=0):
    """Return predictions, `sharpness` times as sharp as they should be, and labels."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(count, classes))
    p = scipy.special.softmax(logits, axis=1)
    labels = np.array([rng.choice(classes, p=row) for row in p])
    shown = scipy.special.softmax(sharpness * logits, axis=1)
    return Predictive(torch.from_numpy(shown)[None, None]), torch.from_numpy(labels)


def sums_of(*clients):
    found = [answer([ONE], [client]) for client in clients]
    total = {name: sum(one[name] for one in found) for name in found[0]}
    return {name.removeprefix("temperature."): tensor for name, tensor in total.items()}


def nll(predictive, labels):
    p = probabilities(predictive)
    return float(-p[torch.arange(len(labels)), labels].log().mean())


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_temperature_is_that_of_an_optimiser_on_pooled_samples(sharpness):
    clients = [predicted(sharpness, count, seed=count) for count in (120, 70, 10)]
    logs = np.log(np.concatenate([c[0].draws[0, 0].numpy() for c in clients]))
    labels = np.concatenate([c[1].numpy() for c in clients])

    def loss(t):
        return -scipy.special.log_softmax(logs / t, axis=1)[np.arange(len(labels)), labels].sum()

    best = scipy.optimize.minimize_scalar(loss, bounds=(0.1, 10), method="bounded")
    found = float(ONE.temperature(sums_of(*clients)))
    assert found == pytest.approx(best.x, rel=2e-3)
    assert loss(found) == pytest.approx(best.fun, rel=1e-6)


def test_adjusting_improves_the_likelihood_and_keeps_the_most_probable_class():
    calibration, (test, labels) = predicted(3.0), predicted(3.0, seed=1)
    adjusted = ONE.adjust(sums_of(calibration), test)
    assert nll(adjusted, labels) < nll(test, labels) - 0.1
    assert adjusted.mean.argmax(-1).equal(test.mean.argmax(-1))
    assert adjusted.draws is test.draws


def test_a_closed_form_is_what_is_adjusted():
    (made, labels), other = predicted(3.0), torch.full((1, 2, 300, 5), 0.2, dtype=torch.float64)
    closed = Predictive(other, closed_form=made.draws[:, 0])
    expected = ONE.adjust(sums_of((made, labels)), made)
    found = ONE.adjust(sums_of((closed, labels)), closed)
    assert found.mean.equal(expected.mean)


def test_a_regression_gets_the_variance_of_its_standardised_errors():
    rng = np.random.default_rng(0)
    draws = torch.from_numpy(rng.normal(size=(1, 4, 200, 2)))
    noise = torch.tensor(0.5)
    made = Predictive(draws, noise)
    mean, variance = draws[0].mean(0), draws[0].var(0, correction=0) + 0.5
    y = mean + torch.tensor([3.0, 0.5]) * variance.sqrt() * torch.from_numpy(
        rng.normal(size=(200, 2))
    )
    t = ONE.temperature(sums_of((made, y)))
    assert t.numpy() == pytest.approx((((y - mean) ** 2 / variance).mean(0)).numpy())
    adjusted = ONE.adjust(sums_of((made, y)), made)
    total = adjusted.draws[0].var(0, correction=0) + adjusted.noise
    assert torch.allclose(total, t * variance)
    assert torch.allclose(adjusted.mean, made.mean)


def test_the_temperature_stays_between_a_tenth_and_ten():
    sure = Predictive(torch.tensor([[[[0.6, 0.4], [0.7, 0.3]]]], dtype=torch.float64))
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    assert float(ONE.temperature(sums_of((sure, right)))) == pytest.approx(0.1)
    assert float(ONE.temperature(sums_of((sure, wrong)))) == pytest.approx(10)


def test_without_samples_nothing_is_scaled():
    none = {name: torch.zeros_like(t) for name, t in sums_of(predicted(1.0)).items()}
    assert float(ONE.temperature(none)) == 1
    exact = {"squares": torch.tensor([0.0, 2.0]).double(), EXAMPLES: torch.tensor(4)}
    assert ONE.temperature(exact).tolist() == [1, 0.5]
