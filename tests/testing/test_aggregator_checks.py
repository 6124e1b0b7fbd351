"""Aggregators with one mistake fail the checks that name it, and no others.

The laws have mutations of their own in `test_law_mutations.py`.
"""

import numpy as np
import pytest
import torch

from bflcore import Aggregator, Average, Gaussian, component
from bflcore.aggregation import State
from bflcore.testing import aggregation_laws, aggregator_checks

from .verdicts import failing, label, reasons, sentences, wrong

UNTOUCHED = "inputs stay untouched"
REFUSED = "weights that make no sense are refused"
DECLARED = "ignored weights are declared"
TAGS = "tags are declared"
NEW = "results are new tensors"
PROCESS = "leaves the process as it was"
CLOSED = "fuse is its closed form"
DTYPE = torch.float64
ALWAYS = {UNTOUCHED, REFUSED, DECLARED, TAGS, NEW, PROCESS}


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


def by(change, fuse=Average.fuse):
    """Return a `fuse` that lets `change` at the right result."""

    def changed(self, posteriors, weights, prior):
        return change(fuse(self, posteriors, weights, prior))

    return changed


def first_64(self, posteriors, weights, prior):
    return Average.fuse(self, posteriors[:64], weights[:64], prior)


def shift_late_coordinates(q):
    return Gaussian(q.mean + (torch.arange(len(q.mean)) > 20), q.variance)


def equal(self, posteriors, weights, prior):
    self.check(posteriors, weights, prior)
    return Average.fuse(self, posteriors, torch.ones_like(weights), prior)


def one_client_as_it_is(self, posteriors, weights, prior):
    self.check(posteriors, weights, prior)
    if len(weights) == 1:
        return posteriors[0]
    return Average.fuse(self, posteriors, weights, prior)


def state_closed_form(factor):
    def closed_form(self, posteriors, weights, prior):
        share = (weights / weights.sum())[:, None]
        return posteriors.map(lambda field: factor * (share * field).sum(0))

    return closed_form


def aside(do):
    """Return a `fuse` that also does something else."""
    return by(lambda q: (do(), q)[1])


@component
class Untagged(Aggregator):
    """Averages, and claims nothing."""

    name = "untagged"
    reference = "new"

    def fuse(self, posteriors, weights, prior):
        self.check(posteriors, weights, prior)
        return Average().fuse(posteriors, weights, prior)


VALID = "results are valid"
WRONG = [
    (average("Keeps a client axis", fuse=by(lambda q: q.map(lambda t: t[None]))), {VALID}),
    (
        average("Forgets clients beyond the 64th", fuse=first_64),
        {
            *("order never matters", "grouping never matters", "a zero weight is absence"),
            "variance is at most the average",
        },
    ),
    (
        average("Is wrong beyond coordinate 20", fuse=by(shift_late_coordinates)),
        {"grouping never matters", "one client is returned", "scale is carried through"}
        | {"identical clients keep their variance", "identical clients keep their mean"},
    ),
    (
        average("Ignores weights and claims nothing", fuse=equal, tags=frozenset()),
        {DECLARED, "grouping never matters", "influence is as stated"},
    ),
    (Untagged, {TAGS}),
    (average("Returns a view of a lone client", fuse=one_client_as_it_is), {NEW}),
    (
        average("Returns tensors that require grad", fuse=by(lambda q: q.map(torch.nn.Parameter))),
        {NEW},
    ),
    (average("Seeds everybody's generator", fuse=aside(lambda: torch.manual_seed(0))), {PROCESS}),
    (average("Draws from everybody's generator", fuse=aside(lambda: torch.rand(1))), {PROCESS}),
    (average("Draws with numpy", fuse=aside(lambda: np.random.rand(1))), {PROCESS}),  # noqa: NPY002
    (average("Prints", fuse=aside(lambda: print("fused"))), {PROCESS}),  # noqa: T201
    (
        average("Changes the default dtype", fuse=aside(lambda: torch.set_default_dtype(DTYPE))),
        {PROCESS},
    ),
    (average("Sets the threads", fuse=aside(lambda: torch.set_num_threads(2))), {PROCESS}),
    (average("Forbids gradients", fuse=aside(lambda: torch.set_grad_enabled(False))), {PROCESS}),
    (
        average(
            "Asks for deterministic algorithms",
            fuse=aside(lambda: torch.use_deterministic_algorithms(True)),
        ),
        {PROCESS},
    ),
    (average("States another closed form", closed_form=state_closed_form(2)), {CLOSED}),
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
            "influence is as stated",
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


def test_a_right_closed_form_is_compared_and_passes():
    part = average("Nothing", closed_form=state_closed_form(1))
    assert CLOSED in sentences(aggregator_checks.checks_of(part))
    assert failing(part) == set()


def test_a_rule_without_tags_is_told_what_is_not_checked():
    reason = reasons(Untagged)[TAGS]
    assert reason.startswith("tags are not declared, so these laws are not checked: pools (the ")
    assert reason.endswith("or tags = frozenset()")


def test_a_right_aggregator_passes():
    assert failing(average("Nothing", families=("point", "gaussian"))) == set()


def test_every_law_that_is_claimed_is_a_check():
    part = average("Claims all there is", tags=frozenset(law.tag for law in aggregation_laws.LAWS))
    laws = {law.name for law in aggregation_laws.LAWS}
    assert sentences(aggregator_checks.checks_of(part)) == {*ALWAYS, *laws}


def test_a_family_that_nobody_knows_is_said_and_nothing_passes_for_want_of_cases():
    part = average("Misspells its family", families=("gausian",))
    found = reasons(part)
    assert found.keys() == sentences(aggregator_checks.checks_of(part)) - {TAGS}
    assert set(found.values()) == {
        "families are ('gausian',), of which none is installed; installed: "
        + found[UNTOUCHED].partition("installed: ")[2]
    }
    assert "gaussian, " in found[UNTOUCHED]


def test_the_reason_says_how_to_refuse():
    (part,) = (part for part, expected in WRONG if expected == {REFUSED})
    assert reasons(part)[REFUSED].endswith("begin with self.check(posteriors, weights, prior)")
