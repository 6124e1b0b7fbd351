"""Flags, from the command line or from Python."""

import pytest

from bflcore import Equal, OptionError
from bflcore.api.flags import resolve_flags
from bflcore.registry.loading import load_registry


def resolved(options=(), **given):
    return resolve_flags(load_registry(), "fedavg", {}, given, options)


def test_flags_set_the_run_the_data_the_parts_and_their_options():
    found = resolved(["inference.momentum=0.5"], rounds=3, data="digits", weighting="equal", lr=0.5)
    assert (found.run.rounds, found.data.data, found.weighting) == (3, "digits", Equal())
    assert (found.inference.lr, found.inference.momentum) == (0.5, 0.5)


def test_short_flags_may_be_text_or_values():
    assert resolved(lr="0.25", local_epochs="2") == resolved(lr=0.25, local_epochs=2)


def test_calibrators_have_options_by_their_names():
    options = ["calibrator.conformal.scope=client", "calibrator.ood.share=0.8"]
    found = resolved(options, calibration_fraction=0.2).calibrators
    assert [(one.name, one.scope) for one in found] == [
        ("temperature", "federated"),
        ("conformal", "client"),
        ("ood", "federated"),
    ]
    assert found[2].share == 0.8


def test_flags_that_are_not_given_change_nothing():
    assert resolved(rounds=None, lr=None, model=None) == resolved()


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ([], {"rouds": 1}, "unknown flag 'rouds' .did you mean rounds"),
        (["inference.lrr=1"], {}, "unknown option 'inference.lrr' .did you mean inference.lr"),
        (["nothing.lr=1"], {}, "unknown part in -o 'nothing'"),
        (["lr"], {}, "-o: 'lr' is not allowed"),
        (["calibrator.scope=client"], {}, "-o: calibrator.scope is not allowed; allowed: calib"),
        (["calibrator.conformall.scope=client"], {}, "'conformall' .did you mean conformal"),
        (["calibrator.conformal.scop=client"], {}, "did you mean calibrator.conformal.scope"),
        (["calibrator.conformal.scope=mine"], {"calibration_fraction": 0.2}, "scope: 'mine' is n"),
        ([], {"lr": "fast"}, "inference.lr: 'fast' is not allowed"),
    ],
)
def test_mistakes_are_one_line(options, given, message):
    with pytest.raises(OptionError, match=message) as error:
        resolved(options, **given)
    assert "\n" not in str(error.value)
