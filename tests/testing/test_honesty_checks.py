"""Inferences that would make a run's figures lie fail the checks that say why, and no others."""

import sys

import attrs
import pytest
import torch

from bflcore import Map, Variational
from bflcore.messages import Cohort
from bflcore.problem.likelihoods import Predictive
from bflcore.randomness import stream
from bflcore.testing import honesty_checks

from .test_inference_checks import (
    DETACHED,
    EACH,
    FAMILY,
    FIT_SEED,
    HONEST,
    MEAN_LOSS,
    PREDICT_SEED,
    PROCESS,
    TESTS,
    UNTOUCHED,
    after,
    changed,
)
from .verdicts import failing, label, reasons, sentences, wrong


def fit_on(cohort_of):
    """Return a `fit` on another cohort."""

    def fit(self, problem, broadcast, cohort):
        return Map.fit(self, problem, broadcast, cohort_of(problem, cohort))

    return fit


def with_test_samples(problem, cohort):
    """Replace the first sample of every client by its first test sample."""
    x, y = cohort.x.clone(), cohort.y.clone()
    for row, client in enumerate(cohort.clients):
        if cohort.sizes[row]:
            own = problem.test.of(client)
            x[row, 0], y[row, 0] = own[0][0], own[1][0]
    return attrs.evolve(cohort, x=x, y=y)


class Unseeded(Cohort):
    """Its random numbers are the same for every seed."""

    def streams(self, purpose):
        return [stream(0, self.round, client, purpose) for client in self.clients]


class Timeless(Cohort):
    """Its random numbers are the same in every round."""

    def streams(self, purpose):
        return [stream(self.seed, 0, client, purpose) for client in self.clients]


def cast(kind):
    """Return the cohort with other random numbers."""

    def of(problem, cohort):
        fields = {field.name: getattr(cohort, field.name) for field in attrs.fields(Cohort)}
        return kind(**fields)

    return of


def predict_as(kind):
    def predict(self, problem, broadcast, cohort, x):
        return Variational.predict(self, problem, broadcast, cast(kind)(problem, cohort), x)

    return predict


def around(before=lambda x: x, then=lambda draws: draws):
    """Return a `predict` on changed samples, with changed draws."""

    def predict(self, problem, broadcast, cohort, x):
        found = Map.predict(self, problem, broadcast, cohort, before(x))
        return Predictive(then(found.draws))

    return predict


def aside(do, method="fit"):
    """Return a method that also does something else, with the problem and the cohort."""

    def changed(self, problem, broadcast, cohort, *x):
        result = getattr(Map, method)(self, problem, broadcast, cohort, *x)
        do(problem, cohort)
        return result

    return {method: changed}


def nudge(problem, cohort):
    for parameter in problem.network.parameters():
        parameter.data.add_(0.1)


def centre_the_block(x):
    return x - x.mean(1, keepdim=True)


def rank_the_block(draws):
    share = (draws / draws.sum(2, keepdim=True) + draws) / 2
    return share / share.sum(-1, keepdim=True)


def require_grad(result):
    return result.map(lambda t: t.clone().requires_grad_())


FAULTS = {
    "Trains on the test samples": ({"fit": fit_on(with_test_samples)}, {TESTS}),
    "Adapts to the test samples": (
        {
            "personalise": lambda self, problem, broadcast, cohort: {
                **cohort.memory,
                "personal.mean": cohort.memory["personal.mean"] + problem.test.x.mean() * 1e-3,
            }
        },
        {TESTS},
    ),
    "Changes the samples that it predicts": (
        {"predict": around(before=lambda x: x.mul_(0.5))},
        {UNTOUCHED, EACH},
    ),
    "Centres the block that it predicts": ({"predict": around(before=centre_the_block)}, {EACH}),
    "Compares the samples of a block": ({"predict": around(then=rank_the_block)}, {EACH}),
    "Forgets the seed": ({"fit": fit_on(cast(Unseeded))}, {FIT_SEED}),
    "Forgets the round": ({"fit": fit_on(cast(Timeless))}, {FIT_SEED}),
    "Reports a thousand times the loss": (
        {"fit": changed("loss", lambda loss: 1000 * loss)},
        {MEAN_LOSS},
    ),
    "Reports the sum over the samples": (
        {"fit": after(lambda r, b, c: attrs.evolve(r, loss=r.loss * torch.tensor(c.sizes)))},
        {MEAN_LOSS},
    ),
    "Returns a posterior that requires grad": (
        {"fit": changed("posterior", require_grad)},
        {DETACHED, FAMILY},
    ),
    "Names the clients in another order": (
        {"fit": changed("clients", lambda clients: clients[::-1])},
        {FAMILY},
    ),
    "Changes the problem's network": (aside(nudge), {UNTOUCHED}),
    "Switches the network to training": (
        aside(lambda problem, _: problem.network.eval()),
        {UNTOUCHED},
    ),
    "Prints": (aside(lambda *_: print("epoch 1")), {PROCESS}),  # noqa: T201
    "Prints when it predicts": (
        aside(lambda *_: print("done", file=sys.stderr), "predict"),  # noqa: T201
        {PROCESS},
    ),
    "Changes the default dtype": (
        aside(lambda *_: torch.set_default_dtype(torch.float64)),
        {PROCESS},
    ),
    "Takes all threads": (aside(lambda *_: torch.set_num_threads(7)), {PROCESS}),
    "Turns determinism on": (
        aside(lambda *_: torch.use_deterministic_algorithms(True)),
        {PROCESS},
    ),
}
WRONG = [(wrong(Map, mistake, **fields), names) for mistake, (fields, names) in FAULTS.items()]
WRONG += [
    (wrong(Variational, "Draws the same for every seed", predict=predict_as(Unseeded)),
     {PREDICT_SEED}),
    (wrong(Variational, "Draws the same in every round", predict=predict_as(Timeless)),
     {PREDICT_SEED}),
]  # fmt: skip


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_dishonest_inference_fails_exactly(part, expected):
    assert failing(part) == expected


def test_every_check_of_honesty_has_an_inference_that_fails_it():
    asked = sentences(honesty_checks.checks_of(Map))
    assert asked == HONEST
    assert asked <= set().union(*(expected for _, expected in WRONG))


@pytest.mark.parametrize(
    ("mistake", "check", "said"),
    [
        ("Trains on the test samples", TESTS, "train on cohort.x and cohort.y alone"),
        ("Changes the samples that it predicts", UNTOUCHED, "the block x given to predict was"),
        ("Centres the block that it predicts", EACH, "each sample must be predicted by itself"),
        ("Forgets the seed", FIT_SEED, "the same with another seed: the spread over seeds would"),
        ("Reports a thousand times the loss", MEAN_LOSS, "return the mean over the samples and"),
        ("Returns a posterior that requires grad", DETACHED, "return it detached"),
        ("Names the clients in another order", FAMILY, "keep its order"),
        ("Changes the problem's network", UNTOUCHED, "the problem's network was changed in place"),
        ("Prints", PROCESS, "the inference prints 'epoch 1'"),
        ("Takes all threads", PROCESS, "changes torch's number of threads for everybody"),
    ],
)
def test_reasons_say_what_is_wrong_and_why(mistake, check, said):
    (part,) = (part for part, _ in WRONG if part.summary() == f"{mistake}.")
    assert said in reasons(part)[check]
