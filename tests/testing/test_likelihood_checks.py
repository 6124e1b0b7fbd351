"""Likelihoods with one mistake fail the checks that name it, and no others."""

import pytest

from bflcore import Categorical, GaussianNoise, Predictive
from bflcore.testing import likelihood_checks

from .verdicts import failing, label, sentences, wrong

TASK = "names its task"
LOSS = "gives a loss per sample"
SHAPE = "predicts in the shape of the outputs"


def nll(change, base=Categorical):
    return lambda self, outputs, targets: change(base.nll(self, outputs, targets))


def predictive(make):
    return lambda self, outputs: make(outputs)


WRONG = [
    (wrong(Categorical, "Names no task", task="ranking"), {TASK, SHAPE}),
    (wrong(Categorical, "Sums over samples", nll=nll(lambda loss: loss.sum())), {LOSS}),
    (wrong(Categorical, "Centres the losses", nll=nll(lambda loss: loss - loss.mean())), {LOSS}),
    (wrong(Categorical, "Takes roots of losses", nll=nll(lambda loss: (-loss).sqrt())), {LOSS}),
    (wrong(Categorical, "Predicts logits", predictive=predictive(Predictive)), {SHAPE}),
    (
        wrong(
            Categorical,
            "Averages over draws",
            predictive=predictive(lambda outputs: Predictive(outputs.softmax(-1).mean(1))),
        ),
        {SHAPE},
    ),
    (wrong(GaussianNoise, "Forgets the noise", predictive=predictive(Predictive)), {SHAPE}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_likelihood_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("part", [Categorical, GaussianNoise])
def test_a_right_likelihood_passes(part):
    assert failing(part) == set()


def test_every_check_has_a_likelihood_that_fails_it():
    names = sentences(likelihood_checks.checks_of(Categorical))
    assert set().union(*(expected for _, expected in WRONG)) == names
