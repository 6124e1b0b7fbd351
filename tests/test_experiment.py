"""Resolving an experiment: defaults of a method take effect, and misspelt ones are refused."""

import pytest

from bflcore import FedAvg, OptionError
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import Plugin, Registry, load_registry


def with_method(**members):
    """Return the installed components and a method with these class members."""
    found = Registry()
    loaded = load_registry()
    for distribution in loaded.plugins:
        parts = [(kind, loaded.get(kind, name)) for kind, name in distribution.components]
        found.add(distribution, parts)
    method = type("Mine", (FedAvg,), {"name": "mine", "__doc__": "Mine.", **members})
    found.add(Plugin("under test", "0", "tests"), [("method", method)])
    return found


def test_a_method_may_choose_the_model():
    registry = with_method(defaults={"model": "two-nn"})
    assert resolve(registry, "mine", {}, {}).model.name == "two-nn"
    assert resolve(registry, "mine", {}, {"model": {"name": "lenet"}}).model.name == "lenet"


@pytest.mark.parametrize("key", ["roundz", "modle", "modle.hidden", "aggregator", "inference"])
def test_a_default_that_sets_nothing_is_refused(key):
    with pytest.raises(OptionError, match=key):
        resolve(with_method(defaults={key: 5}), "mine", {}, {})


def test_a_methods_default_reaches_its_setting():
    experiment = resolve(with_method(defaults={"rounds": 7, "clients": 3}), "mine", {}, {})
    assert (experiment.run.rounds, experiment.data.clients) == (7, 3)
