import pytest
import torch

from bflcore import Calibrator, component
from bflcore.problem.calibration import CALIBRATORS
from bflcore.problem.calibration.base import adjust, answer, fit, measure
from bflcore.problem.calibration.conformal import Conformal
from bflcore.problem.calibration.outliers import Outliers
from bflcore.problem.calibration.temperature import Temperature
from bflcore.problem.likelihoods import Predictive
from bflcore.testing import problems

OWN = {"examples": torch.tensor(10), "counts": torch.tensor([4, 6])}
TOTAL = {"examples": torch.tensor(110), "counts": torch.tensor([64, 46])}


@component
class Doubling(Calibrator):
    """Double the first probability and normalise."""

    name = "doubling"

    def sums(self, predictive, y):
        return {"count": torch.tensor(len(y))}

    def adjust(self, sums, predictive):
        p = predictive.draws * torch.tensor([2.0, 1.0])
        return Predictive(p / p.sum(-1, keepdim=True))


def samples(count=30, seed=0):
    p = problems.normal(1, 2, count, 3, seed=seed).softmax(-1)
    return Predictive(p), torch.arange(count) % 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scope": "federated"}, [64.0, 46.0]),
        ({"scope": "client"}, [4.0, 6.0]),
        ({"scope": "shrunk", "others": 50.0}, [4 + 30.0, 6 + 20.0]),  # 100 others count half
        ({"scope": "shrunk", "others": 1000.0}, [64.0, 46.0]),  # but never more than fully
    ],
)
def test_a_scope_says_how_much_the_others_count(options, expected):
    assert Conformal(**options).chosen(OWN, TOTAL)["counts"].tolist() == expected


@pytest.mark.parametrize("scope", ["federated", "client", "shrunk"])
def test_a_client_without_sums_of_its_own_uses_the_total(scope):
    assert Conformal(scope=scope).chosen({}, TOTAL) is TOTAL


def test_sums_of_a_client_that_are_not_in_the_total_are_not_used():
    one = Conformal(scope="client")
    own, total = answer([one], [samples()]), answer([one], [samples(90, seed=1)])
    counted = total | {"answered": torch.tensor([2, 5])}
    (inside,), (outside,) = (fit([one], client, own, counted) for client in (5, 4))
    assert float(inside.sums["examples"]) == 30
    assert float(outside.sums["examples"]) == 90


def test_nothing_is_fitted_before_the_clients_have_answered():
    assert fit([Conformal()], 0, {}, {}) == ()


def test_answers_over_blocks_add_up():
    calibrators = [one() for one in CALIBRATORS]
    made, y = samples()
    blocks = [(Predictive(made.draws[:, :, rows]), y[rows]) for rows in (slice(12), slice(12, 30))]
    problems.assert_same(
        answer(calibrators, blocks), answer(calibrators, [(made, y)]), "blocks", 1e-12
    )
    assert int(answer(calibrators, blocks)["ood.examples"]) == 30


def test_predictions_are_adjusted_by_one_calibrator_after_the_other():
    made = Predictive(torch.tensor([[[[0.5, 0.5]]]]))
    total = answer([Doubling()], [(made, torch.tensor([0]))]) | {"answered": torch.tensor([0])}
    fitted = fit([Doubling()], 0, {}, total)
    assert adjust(fitted, made).mean[0, 0].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert adjust(fitted * 2, made).mean[0, 0].tolist() == pytest.approx([0.8, 0.2])


def test_what_is_measured_is_whether_a_region_has_the_target_and_its_size():
    calibrators = [Temperature(), Conformal(empty=True), Outliers()]
    made, y = samples(200)
    total = answer(calibrators, [(made, y)]) | {"answered": torch.tensor([0])}
    fitted = fit(calibrators, 0, {}, total)
    found = measure(fitted, made, y)
    inside = fitted[1].region(made, 0.9)
    assert found["set_coverage90"].tolist() == [
        float(row[label]) for row, label in zip(inside, y, strict=True)
    ]
    assert found["set_size90"].equal(inside.sum(1).double())
    assert found["out_of_distribution"].equal(fitted[2].unlike(made).double())
    assert "interval_width90" not in found


def test_intervals_are_measured_per_value():
    one = Conformal()
    draws, noise = problems.normal(1, 3, 40, 2), torch.tensor(0.3)
    made, y = Predictive(draws, noise), problems.normal(40, 2, seed=4)
    total = answer([one], [(made, y)]) | {"answered": torch.tensor([0])}
    fitted = fit([one], 0, {}, total)
    found, (low, high) = measure(fitted, made, y), fitted[0].region(made, 0.8)
    inside = ((low <= y) & (y <= high)).double()
    assert found["interval_coverage80"].equal(inside.mean(1))
    assert found["interval_width80"].equal((high - low).mean(1))
