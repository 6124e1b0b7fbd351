"""Settings of runs and of data."""

import pytest

from bflcore import OptionError
from bflcore.options import build, options_of
from bflcore.options.settings import SETTINGS, DataSettings, RunSettings


def test_no_setting_belongs_to_both_the_run_and_the_data():
    run, data = (
        {option.name for option in options_of(part)} for part in (RunSettings, DataSettings)
    )
    assert run & data == set()
    assert {"run": RunSettings, "data": DataSettings} == SETTINGS


@pytest.mark.parametrize("part", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_has_a_help_text_and_a_default_that_is_allowed(part):
    part()
    for option in options_of(part):
        assert option.help, option.name


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"pretrain": 1.5}, {"drop_out": -0.1}, {"share": "most"}, {"dtype": "float16"}],
    ids=str,
)
def test_settings_out_of_bounds_are_refused(wrong):
    with pytest.raises(OptionError, match=r"is not allowed; allowed: "):
        build(RunSettings, wrong, "--")


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_not_all_samples_are_held_out_for_testing(fraction):
    with pytest.raises(OptionError, match="--test-fraction"):
        build(DataSettings, {"test_fraction": fraction}, "--")


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_not_all_training_samples_can_validate(fraction):
    assert DataSettings().validation_fraction == 0
    with pytest.raises(OptionError, match="--validation-fraction: .*; allowed: "):
        build(DataSettings, {"validation_fraction": fraction}, "--")
