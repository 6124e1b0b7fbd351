"""Parts fit together when they know the same posterior family."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from bflcore import (
    Aggregator,
    Average,
    Continual,
    EmpiricalBayes,
    Equal,
    Examples,
    Fixed,
    Map,
    Variational,
    component,
)
from bflcore.errors import IncompatibleError
from bflcore.experiments.compatibility import check, fits, ignored
from bflcore.registry.loading import Plugin, Registry


def registry(*parts):
    found = Registry()
    found.add(Plugin("some", "1", "some.plugin"), parts)
    return found


@pytest.mark.parametrize("part", [Average, Examples, Equal, Fixed, Continual])
@pytest.mark.parametrize("inference", [Map, Variational])
def test_parts_that_know_every_family_fit_every_inference(inference, part):
    assert fits(inference, part)


def test_empirical_bayes_fits_gaussians_alone():
    assert fits(Variational, EmpiricalBayes)
    assert not fits(Map, EmpiricalBayes)


def test_a_part_without_families_fits_anything():
    assert Examples.families == ()
    assert fits(Map, Examples)


def test_parts_that_fit_pass_in_silence():
    check(registry(), Variational, Average, Examples, EmpiricalBayes)
    check(registry(), Map)


def test_a_part_that_does_not_fit_is_refused_naming_those_that_would():
    known = registry(Continual, EmpiricalBayes, Fixed)
    with pytest.raises(IncompatibleError) as refusal:
        check(known, Map, Average, Examples, EmpiricalBayes)
    assert str(refusal.value) == (
        "hyper empirical-bayes needs posteriors of the family gaussian, but inference map gives "
        "point; hypers that fit: continual, fixed (bfl matrix shows all combinations)"
    )


@component
class Choosy(Variational):
    """Needs an update that carries the posterior."""

    name = "choosy"
    needs = MappingProxyType({"hyper": "carries-posterior"})


def test_a_part_without_a_needed_tag_is_refused_naming_those_that_have_it():
    assert fits(Choosy, Continual)
    assert not fits(Choosy, Fixed)
    assert fits(Choosy, Average)
    check(registry(Fixed, Continual), Choosy, Average, Continual)
    told = "inference choosy does not work with hyper fixed, which lacks the tag carries-posterior"
    with pytest.raises(IncompatibleError, match=rf"{told} .*; hypers that fit: continual \("):
        check(registry(Fixed, Continual), Choosy, Fixed)


def test_the_refusal_says_when_nothing_would_fit():
    with pytest.raises(IncompatibleError, match="hypers that fit: none"):
        check(registry(EmpiricalBayes), Map, EmpiricalBayes)


class Product(Aggregator):
    """Adds evidence."""

    name = "product"
    weighs = False
    ignores_weights_because = "every client's evidence counts in full"

    def fuse(self, posteriors, weights, prior):
        return prior


class Middle(Product):
    """Takes the middle."""

    name = "middle"
    ignores_weights_because = "clients could lie about theirs"


@pytest.mark.parametrize(
    ("rule", "why"),
    [(Product(), "every client's evidence counts in full"), (Middle(), "clients could lie")],
)
def test_a_weighting_asked_for_in_vain_is_said_to_be_ignored(rule, why):
    note = ignored(rule, "distance")
    assert note.startswith("note: --weighting distance does not change the fusion")
    assert rule.name in note
    assert why in note
    assert "\n" not in note


def test_nothing_is_said_of_a_weighting_that_counts_or_was_not_asked_for():
    assert ignored(Average(), "distance") == ""
    assert ignored(Product(), None) == ""
