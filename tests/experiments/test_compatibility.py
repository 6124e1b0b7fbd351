"""Parts fit together when they know the same posterior family."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

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
)
from bflcore.engines.local import Local
from bflcore.errors import IncompatibleError
from bflcore.experiments.compatibility import caveats, check, fits, ignored
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import Plugin, Registry, load_registry


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


class Certain(Variational):
    """Leaves some parameters certain."""

    leaves_certain = True


class Multiplies(Product):
    """Multiplies densities."""

    name = "multiplies"
    tags = frozenset({"adds-precision"})


class Switch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.fixture
def prepared():
    flags = {
        "data": {"data": "synthetic", "partition": "natural", "clients": 3},
        "dataset": {"owners": 3, "samples": 20, "features": 6, "classes": 3},
    }
    return prepare(resolve(load_registry(), "fedvi", {}, flags))


def with_parts(prepared, **parts):
    return attrs.evolve(prepared, experiment=attrs.evolve(prepared.experiment, **parts))


def switching(prepared):
    network = nn.Sequential(nn.Linear(6, 4), Switch(), nn.Linear(4, 3))
    return attrs.evolve(prepared, problem=attrs.evolve(prepared.problem, network=network))


def test_an_ordinary_experiment_has_no_caveats(prepared):
    assert caveats(prepared) == []
    assert caveats(with_parts(prepared, engine=Local(chunk=3))) == []


def test_certain_parameters_and_a_rule_that_multiplies_densities_are_warned_of(prepared):
    (text,) = caveats(with_parts(prepared, inference=Certain(), aggregator=Multiplies()))
    assert "inference variational" in text
    assert "aggregator multiplies" in text
    assert "--aggregator average" in text
    assert "\n" not in text


def test_either_alone_is_not_warned_of(prepared):
    assert caveats(with_parts(prepared, inference=Certain())) == []
    assert caveats(with_parts(prepared, aggregator=Multiplies())) == []
    assert caveats(with_parts(prepared, inference=Certain(), aggregator=Product())) == []


@pytest.mark.parametrize(
    ("chunk", "cohort", "together"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 2), (9, 0, 3), (3, 2, 2), (3, 1, 0)],
)
def test_a_network_that_cannot_be_batched_is_warned_of_where_clients_train_together(
    prepared, chunk, cohort, together
):
    run = attrs.evolve(prepared.experiment.run, cohort=cohort)
    found = caveats(with_parts(switching(prepared), engine=Local(chunk=chunk), run=run))
    assert len(found) == bool(together)
    for text in found:
        assert f"the {together} clients of a training step" in text
        assert "layer 1 (Switch)" in text
        assert "\n" not in text


def test_on_a_gpu_all_clients_train_together(prepared):
    of = prepared.problem
    train = attrs.evolve(of.train, x=of.train.x.to("meta"))
    assert Local().clients_per_step(attrs.evolve(of, train=train)) == 3
    assert Local().clients_per_step(of) == 1
    assert Local(chunk=2).clients_per_step(of) == 2
    assert torch.device("meta") == train.x.device
