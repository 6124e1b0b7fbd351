"""Metrics know what on validation samples they correspond to."""

import pytest

from bflcore import OptionError
from bflcore.studies.metrics import check_metric, chosen_on, shown


@pytest.mark.parametrize(
    ("metric", "on", "name"),
    [
        ("personal.nll", "validation", "validation.nll"),
        ("novel.accuracy", "validation", "validation.novel.accuracy"),
        ("validation.ece", "validation", "validation.ece"),
        ("personal.nll", "test", "personal.nll"),
        ("ood.auroc", "test", "ood.auroc"),
        ("personal.aurc", "validation", "validation.aurc"),
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
