"""Aggregators with one mistake fail the checks that name it, and no others.

The laws have mutations of their own in `tests/laws`.
"""

import pytest
import torch
from testing.verdicts import failing, label, reasons, sentences, wrong

from bflcore import Average, Gaussian
from bflcore.testing import aggregation_laws, aggregator_checks

UNTOUCHED = "inputs stay untouched"
REFUSED = "weights that make no sense are refused"


def average(mistake, **fields):
    return wrong(Average, mistake, **{"families": ("gaussian",), **fields})


def spend_the_weights(self, posteriors, weights, prior):
    fused = Average.fuse(self, posteriors, weights, prior)
    weights.mul_(2)
    return fused


def accept_all(self, posteriors, weights, prior):
    return self.decode(self.encode(posteriors, weights, prior), prior)


def halve_the_variance(self, posteriors, weights, prior):
    fused = Average.fuse(self, posteriors, weights, prior)
    return Gaussian(fused.mean, fused.variance / 2)


def favour_the_first(self, posteriors, weights, prior):
    self.check(posteriors, weights, prior)
    boost = torch.ones_like(weights)
    boost[0] = 2
    return Average.fuse(self, posteriors, weights * boost, prior)


WRONG = [
    (average("Doubles the weights in place", fuse=spend_the_weights), {UNTOUCHED}),
    (average("Accepts any weights", fuse=accept_all), {REFUSED}),
    (
        average("Halves the variance", fuse=halve_the_variance),
        {
            "one client is returned",
            "identical clients keep their variance",
            "grouping never matters",
        },
    ),
    (
        average("Favours the first client", fuse=favour_the_first),
        {
            "order never matters",
            "grouping never matters",
            "a zero weight is absence",
            "variance is at most the average",
        },
    ),
    (
        average("Claims that evidence adds up", tags=Average.tags | {"shrinks-variance"}),
        {"identical clients divide their variance"},
    ),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_aggregator_fails_exactly(part, expected):
    assert failing(part) == expected


def test_a_right_aggregator_passes():
    assert failing(average("Nothing", families=("point", "gaussian"))) == set()


def test_every_law_that_is_claimed_is_a_check():
    part = average("Claims all there is", tags=frozenset(law.tag for law in aggregation_laws.LAWS))
    laws = {law.name for law in aggregation_laws.LAWS}
    assert sentences(aggregator_checks.checks_of(part)) == {UNTOUCHED, REFUSED, *laws}


def test_a_family_that_nobody_knows_is_said_and_nothing_passes_for_want_of_cases():
    part = average("Misspells its family", families=("gausian",))
    found = reasons(part)
    assert found.keys() == sentences(aggregator_checks.checks_of(part))
    assert set(found.values()) == {
        "families are ('gausian',), of which none is installed; installed: "
        + found[UNTOUCHED].partition("installed: ")[2]
    }
    assert "gaussian, " in found[UNTOUCHED]


def test_the_reason_says_how_to_refuse():
    (part,) = (part for part, expected in WRONG if expected == {REFUSED})
    assert reasons(part)[REFUSED].endswith("begin with self.check(posteriors, weights, prior)")
