"""Methods with one mistake fail the checks that name it, and no others."""

import pytest

from bflcore import EmpiricalBayes, FedAvg, FedVI, Map, component
from bflcore.testing import method_checks

from .verdicts import failing, label, reasons, sentences, wrong

FIT = "parts exist and fit"
RUNS = "runs two rounds"


@component
class Unregistered(Map):
    """Train as usual, unknown to the registry."""

    name = "unregistered"


def method(mistake, base=FedAvg, **fields):
    return wrong(base, mistake, decorate=lambda cls: cls, **fields)


WRONG = [
    (method("Chooses what no hook yields", inference=Unregistered()), {FIT}),
    (method("Chooses an update of another family", hyper=EmpiricalBayes()), {FIT, RUNS}),
    (method("Explodes", inference=Map(anchor=1e300)), {RUNS}),
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
    ("mistake", "check", "said"),
    [
        (
            "Chooses what no hook yields",
            FIT,
            "inference unregistered is not registered; yield Unregistered from bfl_inferences",
        ),
        ("Chooses an update of another family", RUNS, "empirical-bayes"),
        ("Explodes", RUNS, "0 of 3 clients gave a valid result"),
    ],
)
def test_the_reason_is_the_message_that_a_user_would_see(mistake, check, said):
    (part,) = (part for part, _ in WRONG if part.summary() == f"{mistake}.")
    assert said in reasons(part)[check]
