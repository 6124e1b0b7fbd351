"""Calibrators with one mistake fail the checks that name it, and no others."""

import attrs
import pytest
import torch

from bflcore.problem.calibration import CALIBRATORS
from bflcore.problem.calibration.conformal import Conformal
from bflcore.problem.calibration.temperature import Temperature
from bflcore.testing import calibrator_checks

from .verdicts import failing, label, sentences, wrong

ADD = "sums add up over samples"
FORM = "sums are counts or positive numbers"
INPUTS = "inputs stay unchanged"
ADJUSTED = "adjusted predictions are predictions"
ALONE = "samples are calibrated one by one"
REGIONS = "regions have a shape and grow with the coverage"


def sums(change):
    def changed(self, predictive, y):
        return {name: change(t) for name, t in Conformal.sums(self, predictive, y).items()}

    return changed


def region(change):
    def changed(self, sums, predictive, coverage):
        return change(Conformal.region(self, sums, predictive, coverage), coverage)

    return changed


def adjust(change):
    def changed(self, sums, predictive):
        return change(Temperature.adjust(self, sums, predictive))

    return changed


def double(predictive):
    return attrs.evolve(predictive, draws=2 * predictive.draws, closed_form=None)


def beside(predictive):
    mixed = predictive.draws.mean(2, keepdim=True).expand_as(predictive.draws)
    return attrs.evolve(predictive, draws=mixed, closed_form=None)


def spoil(self, sums, predictive):
    predictive.draws.fill_(0.5)
    return predictive


WRONG = [
    (wrong(Conformal, "Takes means", sums=sums(lambda t: t.double() / t.sum())), {ADD}),
    (wrong(Conformal, "Counts in float32", sums=sums(lambda t: t.float())), {FORM}),
    (wrong(Conformal, "Subtracts", sums=sums(lambda t: -t), region=lambda *_: None), {FORM}),
    (wrong(Temperature, "Changes draws", adjust=spoil), {INPUTS, ADJUSTED}),
    (
        wrong(Temperature, "Doubles", adjust=adjust(double), tasks=("classification",)),
        {ADJUSTED},
    ),
    (wrong(Temperature, "Averages over samples", adjust=adjust(beside)), {ALONE}),
    (
        wrong(Conformal, "Gives numbers", region=region(lambda r, _: r.float())),
        {REGIONS},
    ),
    (
        wrong(
            Conformal,
            "Shrinks",
            tasks=("classification",),
            region=region(lambda r, c: torch.full_like(r, fill_value=c < 0.6)),
        ),
        {REGIONS},
    ),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_calibrator_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("part", CALIBRATORS)
def test_a_right_calibrator_passes(part):
    assert failing(part) == set()


def test_every_check_has_a_calibrator_that_fails_it():
    names = sentences(calibrator_checks.checks_of(Conformal))
    assert set().union(*(expected for _, expected in WRONG)) == names
