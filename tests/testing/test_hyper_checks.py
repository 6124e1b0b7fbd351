"""Hyperparameter updates with one mistake fail the checks that name it, and no others."""

import attrs
import pytest
import torch

from bflcore import Broadcast, Continual, EmpiricalBayes, Fixed, Gaussian
from bflcore.testing import hyper_checks, problems

from .verdicts import failing, label, reasons, sentences, wrong

UNTOUCHED = "inputs stay untouched"
PROCESS = "leaves the process as it was"
ROUNDS = "rounds are counted"
VALID = "the next broadcast is valid"
SUMS = "summaries add up"
NEVER_FALLS = "the objective never falls"
CARRIED = "the posterior is the next prior"


def continual(mistake, change):
    def update(self, broadcast, fused, total):
        return change(Continual.update(self, broadcast, fused, total), broadcast, fused)

    return wrong(Continual, mistake, update=update, families=("gaussian",))


def bayes(mistake, **fields):
    return wrong(EmpiricalBayes, mistake, **fields)


def move_the_fused(following, broadcast, fused):
    fused.mean.add_(1)
    return following


def take_all_threads(following, broadcast, fused):
    torch.set_num_threads(7)
    return following


def with_prior(change):
    return lambda following, *_: attrs.evolve(following, prior=change(following.prior))


def mean_instead_of_sum(self, result, weights, broadcast):
    sums = EmpiricalBayes.summarise(self, result, weights, broadcast)
    return {name: tensor / len(weights) for name, tensor in sums.items()}


def weight_of_the_first(self, result, weights, broadcast):
    sums = EmpiricalBayes.summarise(self, result, weights, broadcast)
    return {**sums, "weight": weights[0]}


def too_certain(self, broadcast, fused, total):
    following = EmpiricalBayes.update(self, broadcast, fused, total)
    prior = Gaussian(following.prior.mean, following.prior.variance / 100)
    return Broadcast(following.round, following.start, prior)


WRONG = [
    (continual("Moves the fused posterior in place", move_the_fused), {UNTOUCHED}),
    (continual("Takes all threads", take_all_threads), {PROCESS}),
    (
        continual("Counts by two", lambda f, *_: attrs.evolve(f, round=f.round + 1)),
        {ROUNDS},
    ),
    (continual("Stays in the round", lambda f, b, _: attrs.evolve(f, round=b.round)), {ROUNDS}),
    (
        continual("Has negative variances", with_prior(lambda p: Gaussian(p.mean, -p.variance))),
        {VALID, CARRIED},
    ),
    (
        continual("Has a prior in float32", with_prior(lambda p: p.map(torch.Tensor.float))),
        {VALID, CARRIED},
    ),
    (
        continual("Has a prior of clients", with_prior(lambda p: p.map(lambda t: t[None]))),
        {VALID, CARRIED},
    ),
    (
        continual("Starts from a half", lambda f, *_: attrs.evolve(f, start=f.start[:7])),
        {VALID, CARRIED},
    ),
    (bayes("Takes a mean instead of a sum", summarise=mean_instead_of_sum), {SUMS}),
    (bayes("Takes the first client's weight for all", summarise=weight_of_the_first), {SUMS}),
    (
        continual("Widens the prior", with_prior(lambda q: Gaussian(q.mean, 2 * q.variance))),
        {CARRIED},
    ),
    (
        wrong(Fixed, "Claims to carry the posterior", tags=frozenset({"carries-posterior"})),
        {CARRIED},
    ),
    (bayes("Claims to be monotone and shrinks the prior", update=too_certain), {NEVER_FALLS}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_update_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("base", [Fixed, Continual, EmpiricalBayes])
def test_a_right_update_passes(base):
    assert failing(wrong(base, "Nothing", families=("gaussian",))) == set()


def test_every_check_has_an_update_that_fails_it():
    names = {
        name
        for part in (EmpiricalBayes, Continual)
        for name in sentences(hyper_checks.checks_of(part))
    }
    assert set().union(*(expected for _, expected in WRONG)) == names


def test_a_family_that_no_inference_gives_is_said():
    found = reasons(wrong(Fixed, "Misspells its family", families=("gausian",)))
    assert found.keys() == sentences(hyper_checks.checks_of(Fixed))
    for reason in found.values():
        assert reason.startswith(
            "families are ('gausian',), which no inference of its methods gives: "
        )
        assert "map (point)" in reason


def test_results_that_one_update_spoils_are_fresh_for_the_next():
    spoiler = WRONG[0][0]
    assert failing(spoiler) == {UNTOUCHED}
    inference = next(iter(hyper_checks._inferences(spoiler)))  # noqa: SLF001 - what is kept
    kept = problems.copies(*hyper_checks._fitted(inference))  # noqa: SLF001
    failing(spoiler)
    for thing, copy in zip(hyper_checks._fitted(inference), kept, strict=True):  # noqa: SLF001
        problems.assert_same(thing, copy, "what is kept", 0.0)
