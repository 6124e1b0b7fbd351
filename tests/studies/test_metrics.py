"""Metrics know which direction is better, and what on validation samples they correspond to."""

import pytest

from bflcore import OptionError
from bflcore.studies.metrics import check_metric, chosen_on, direction, shown


def test_direction_is_that_in_which_a_model_gets_better():
    higher = ["personal.accuracy", "ood.auroc", "global.f1"]
    lower = ["novel.nll", "validation.rmse", "ood.fpr95", "personal.ece"]
    neither = ["personal.coverage90", "personal.entropy", "posterior.x"]
    found = [[direction(name) for name in names] for names in (higher, lower, neither)]
    assert found == [[1] * 3, [-1] * 4, [0] * 3]


@pytest.mark.parametrize(
    ("metric", "on", "name"),
    [
        ("personal.nll", "validation", "validation.nll"),
        ("novel.accuracy", "validation", "validation.novel.accuracy"),
        ("validation.ece", "validation", "validation.ece"),
        ("personal.nll", "test", "personal.nll"),
        ("ood.auroc", "test", "ood.auroc"),
    ],
)
def test_a_choice_is_made_on_the_samples_that_are_named(metric, on, name):
    assert chosen_on(metric, on) == name


@pytest.mark.parametrize(
    ("metric", "on", "message"),
    [
        ("personal.nll", "train", "unknown samples of --on: 'train'; allowed: test, validation"),
        ("personal.entropy", "validation", "does not say which value is better"),
        ("validation.nll", "test", "is not on test data"),
        ("ood.auroc", "validation", "is measured on test data alone"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(metric, on, message):
    with pytest.raises(OptionError, match=message):
        chosen_on(metric, on)


def test_a_table_shows_the_usual_metrics_or_those_that_there_are():
    known = ["personal.nll", "personal.accuracy", "personal.mce", "validation.nll"]
    assert shown(known) == ("personal.accuracy", "personal.nll", "validation.nll")
    assert shown(["d", "c", "b", "a", "e"]) == ("a", "b", "c", "d")
    with pytest.raises(OptionError, match=r"unknown metric of --metric 'personal.nl' .*nll"):
        check_metric("personal.nl", known)
