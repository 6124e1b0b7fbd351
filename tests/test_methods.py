"""Methods: what they may choose, what is refused where it is written, and the core's own."""

import pytest

from bflcore import (
    Average,
    Equal,
    Examples,
    FedAvg,
    FedVI,
    Fixed,
    Map,
    Method,
    OptionError,
)
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry


def resolved(method, **file):
    return resolve(load_registry(), method, file, {})


def test_fedvi_is_the_studys_flipout_under_its_learning_rate_schedule():
    inference = resolved("fedvi").inference
    assert inference.estimator == "flipout"
    assert inference.lr_at(0) == inference.lr_at(50) == inference.lr
    # 4 % per round after round 50 (Fischer et al. 2024).
    assert inference.lr_at(53) == pytest.approx(0.96**3 * inference.lr)


@pytest.mark.parametrize("method", ["fedavg", "fedvi"])
def test_the_cores_methods_average_by_examples_under_a_fixed_prior(method):
    found = resolved(method)
    assert (found.aggregator, found.weighting, found.hyper) == (Average(), Examples(), Fixed())
    assert found.run.share == "all"


def test_fedvis_options_give_way_to_the_users():
    faster = {"estimator": "local-reparameterisation", "lr_decay": 0.0}
    inference = resolved("fedvi", inference=faster).inference
    assert inference.estimator == "local-reparameterisation"
    assert inference.lr_at(99) == inference.lr


MISTAKES = {
    "part": ({"wieghting": Equal()}, r"unknown attribute 'wieghting' \(did you mean weighting\?\)"),
    "string": ({"inference": "map"}, "inference: 'map' is not allowed; .*bflcore.LocalInference"),
    "class": ({"weighting": Equal}, r"weighting: Equal is not allowed; .*; write Equal\(\)"),
    "kind": ({"hyper": Equal()}, "hyper: .*Equal.* allowed: an instance of bflcore.HyperUpdate"),
    "share": ({"share": "bodi"}, "settings.share: 'bodi' is not allowed; allowed: all"),
    "setting": ({"settings": {"roundz": 5}}, r"unknown setting 'roundz' \(did you mean rounds\?\)"),
    "setting-of-a-part": ({"settings": {"inference.lr": 5}}, "unknown setting 'inference.lr'"),
    "value": ({"settings": {"rounds": 0}}, "settings.rounds: 0 is not allowed; allowed: at least"),
    "type": ({"settings": {"clients": "3"}}, "settings.clients: '3' is not allowed; allowed: int"),
    "twice": ({"settings": {"share": "body"}}, 'settings: write share = "body" beside'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_where_the_method_is_defined(mistake):
    members, said = MISTAKES[mistake]
    with pytest.raises(OptionError, match=f"method mine: {said}"):
        type("Mine", (FedAvg,), {"name": "mine", **members})


def test_a_method_without_an_inference_is_refused():
    with pytest.raises(OptionError, match=r"method mine: inference is missing; add inference ="):
        type("Mine", (Method,), {"name": "mine"})


def test_a_misspelt_option_of_a_part_is_refused_with_the_nearest():
    with pytest.raises(OptionError, match=r"inference map: 'anchr' \(did you mean anchor\?\)"):
        Map(anchr=0.1)


def test_settings_cannot_be_changed_afterwards():
    mine = type("Mine", (FedAvg,), {"name": "mine", "settings": {"rounds": 5}})
    with pytest.raises(TypeError):
        mine.settings["rounds"] = 6


def test_the_parts_of_a_method_are_those_it_chooses():
    assert set(FedVI.parts()) == {"inference", "aggregator", "weighting", "hyper"}


def test_every_installed_method_chooses_registered_parts():
    for method in load_registry().methods.values():
        for kind, part in method.parts().items():
            assert load_registry().of(kind)[part.name] is type(part)
