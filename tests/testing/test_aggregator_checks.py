"""Aggregators with one mistake fail the checks that name it, and no others.

The laws have mutations of their own in `test_law_mutations.py`.
"""

import pytest
import torch

from bflcore import Average, Gaussian
from bflcore.aggregation import State
from bflcore.testing import aggregation_laws, aggregator_checks

from .verdicts import failing, label, reasons, sentences, wrong

UNTOUCHED = "inputs stay untouched"
REFUSED = "weights that make no sense are refused"
DECLARED = "ignored weights are declared"


def average(mistake, **fields):
    return wrong(Average, mistake, **{"families": ("gaussian",), **fields})


def spend_the_weights(self, posteriors, weights, prior):
    fused = Average.fuse(self, posteriors, weights, prior)
    weights.mul_(2)
    return fused


def accept_all(self, posteriors, weights, prior):
    return self.finish(self.add(self.start(prior), posteriors, weights))


def halve_the_variance(self, posteriors, weights, prior):
    fused = Average.fuse(self, posteriors, weights, prior)
    return Gaussian(fused.mean, fused.variance / 2)


def favour_the_first(self, posteriors, weights, prior):
    self.check(posteriors, weights, prior)
    boost = torch.ones_like(weights)
    boost[0] = 2
    return Average.fuse(self, posteriors, weights * boost, prior)


def keep_every_client(self, state, posteriors, weights):
    added = Average.add(self, state, posteriors, weights)
    kept = state.tensors.get("kept", posteriors.mean[:0].flatten())
    return State(state.prior, {**added.tensors, "kept": torch.cat([kept, posteriors.mean[:, 0]])})


def merge_by_position(self, left, right):
    if not left.tensors or not right.tensors:
        return left if left.tensors else right
    both = zip(left.tensors, left.tensors.values(), right.tensors.values(), strict=True)
    return State(left.prior, {name: one + two for name, one, two in both})


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
    (
        average("Says that weights do not matter", weighs=False, ignores_weights_because="of it"),
        {DECLARED, "variance is at most the average"},
    ),
    (average("Keeps every client", add=keep_every_client), {"states do not grow"}),
    (average("Merges by position", merge=merge_by_position), {"states are plain tensors"}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_aggregator_fails_exactly(part, expected):
    assert failing(part) == expected


def test_a_right_aggregator_passes():
    assert failing(average("Nothing", families=("point", "gaussian"))) == set()


def test_every_law_that_is_claimed_is_a_check():
    part = average("Claims all there is", tags=frozenset(law.tag for law in aggregation_laws.LAWS))
    laws = {law.name for law in aggregation_laws.LAWS}
    assert sentences(aggregator_checks.checks_of(part)) == {UNTOUCHED, REFUSED, DECLARED, *laws}


def test_a_family_that_nobody_knows_is_said_and_nothing_passes_for_want_of_cases():
    part = average("Misspells its family", families=("gausian",))
    found = reasons(part)
    assert found.keys() == sentences(aggregator_checks.checks_of(part)) - {DECLARED}
    assert set(found.values()) == {
        "families are ('gausian',), of which none is installed; installed: "
        + found[UNTOUCHED].partition("installed: ")[2]
    }
    assert "gaussian, " in found[UNTOUCHED]


def test_the_reason_says_how_to_refuse():
    (part,) = (part for part, expected in WRONG if expected == {REFUSED})
    assert reasons(part)[REFUSED].endswith("begin with self.check(posteriors, weights, prior)")
