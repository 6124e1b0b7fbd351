"""Methods with one mistake fail the checks that name it, and no others."""

import pytest
from testing.verdicts import failing, label, reasons, sentences, wrong

from bflcore import FedAvg, FedVI
from bflcore.testing import method_checks

FIT = "parts exist and fit"
RUNS = "runs two rounds"


def method(mistake, base=FedAvg, **fields):
    return wrong(base, mistake, decorate=lambda cls: cls, **fields)


WRONG = [
    (method("Names an inference that nobody has", inference="mapp"), {FIT, RUNS}),
    (method("Names an update of another family", hyper="empirical-bayes"), {FIT, RUNS}),
    (method("Sets an option that its part has not", defaults={"inference.tempo": 1}), {FIT, RUNS}),
    (method("Sets an option to nonsense", defaults={"inference.anchor": -1.0}), {FIT, RUNS}),
    (method("Explodes", defaults={"inference.anchor": 1e300}), {RUNS}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_method_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize("base", [FedAvg, FedVI])
def test_a_right_method_passes_although_nobody_installed_it(base):
    assert failing(method("Nothing", base)) == set()


def test_every_check_has_a_method_that_fails_it():
    names = sentences(method_checks.checks_of(FedAvg))
    assert set().union(*(expected for _, expected in WRONG)) == names


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("Names an inference that nobody has", "unknown inference 'mapp' (did you mean map?)"),
        ("Names an update of another family", "empirical-bayes"),
        ("Sets an option that its part has not", "inference.tempo"),
        ("Sets an option to nonsense", "inference.anchor: -1.0 is not allowed"),
        ("Explodes", "0 of 3 clients gave a valid result"),
    ],
)
def test_the_reason_is_the_message_that_a_user_would_see(mistake, said):
    (part,) = (part for part, _ in WRONG if part.summary() == f"{mistake}.")
    assert said in reasons(part)[RUNS]
