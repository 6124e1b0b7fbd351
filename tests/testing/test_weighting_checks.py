"""Weightings with one mistake fail the checks that name it, and no others."""

import pytest
import torch

from bflcore import Equal, Examples
from bflcore.testing import weighting_checks

from .verdicts import failing, label, reasons, sentences, wrong

UNTOUCHED = "inputs stay untouched"
PROCESS = "leaves the process as it was"
SENSE = "weights make sense"
ORDER = "order is carried through"
IDENTICAL = "identical clients weigh the same"
ALONE = "a client is weighed alone"


def weighting(mistake, weigh, local=True, families=("gaussian",)):
    return wrong(Examples, mistake, weigh=weigh, local=local, families=families)


def by_size(change):
    return lambda self, posteriors, examples, broadcast: change(examples.double())


def move_the_server(self, posteriors, examples, broadcast):
    broadcast.start.mean.add_(1)
    return examples.double()


def seed_everybody(self, posteriors, examples, broadcast):
    torch.manual_seed(0)
    return examples.double()


def by_inverse_distance(self, posteriors, examples, broadcast):
    means = posteriors.mean
    return 1 / torch.cdist(means, means).sum(1)


WRONG = [
    (weighting("Seeds everybody", seed_everybody), {PROCESS}),
    (weighting("Moves the server's posterior in place", move_the_server), {UNTOUCHED}),
    (weighting("Weighs in float32", lambda self, q, n, b: n.float()), {SENSE}),
    (weighting("Weighs below zero", by_size(lambda n: -n)), {SENSE}),
    (weighting("Weighs nobody", by_size(lambda n: 0 * n)), {SENSE, IDENTICAL}),
    (weighting("Sorts by size", by_size(lambda n: n.sort().values), local=False), {ORDER}),
    (
        weighting("Favours the first client", by_size(lambda n: n / torch.arange(1, len(n) + 1))),
        {ORDER, IDENTICAL, ALONE},
    ),
    (
        weighting("Divides by the distance from itself", by_inverse_distance, local=False),
        {IDENTICAL},
    ),
    (weighting("Says local and divides by the sum", by_size(lambda n: n / n.sum())), {ALONE}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_weighting_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("base", [Examples, Equal])
@pytest.mark.parametrize("local", [True, False])
def test_a_right_weighting_passes(base, local):
    assert failing(wrong(base, "Nothing", local=local)) == set()


def test_every_check_has_a_weighting_that_fails_it():
    names = sentences(weighting_checks.checks_of(Examples))
    assert set().union(*(expected for _, expected in WRONG)) == names


def test_only_a_local_weighting_is_asked_to_weigh_clients_alone():
    part = weighting("Needs all", by_size(lambda n: n / n.sum()), local=False)
    assert failing(part) == set()
    assert ALONE not in sentences(weighting_checks.checks_of(part))


def test_the_reason_names_the_declaration_to_change():
    (part,) = (part for part, expected in WRONG if expected == {ALONE})
    assert "declare local = False" in reasons(part)[ALONE]
