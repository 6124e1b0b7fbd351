"""The settings: every training of every setting is a valid run, equal for all methods."""

import pytest

from bfl_shift.settings import SETTINGS, cell_of, named
from bfl_shift.shifts import REFERENCE, shifts_of
from bflcore.studies.execution import resolve_cells


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_training_is_a_valid_run(setting):
    cells = [cell_of(setting, name, "fedvi") for name in setting.trainings]
    experiments = resolve_cells(cells)
    for cell in cells:
        training, method = named(cell.name)
        assert method == "fedvi"
        assert experiments[cell.name].data.data == setting.data_of(training)
        assert experiments[cell.name].run.rounds == setting.flags["rounds"]
        assert experiments[cell.name].data.ood == "none"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_a_setting_has_at_least_six_shifts_besides_the_reference(setting):
    shifts = shifts_of(setting)
    assert len(shifts.keys() - {REFERENCE}) >= 6
    assert {shift.training for shift in shifts.values()} == setting.trainings.keys()


def test_clothes_are_compared_with_both_data_sets_of_digits():
    for setting in SETTINGS.values():
        pairs = {
            frozenset({setting.data_of(training), data})
            for training, data in setting.foreign.values()
        }
        both = {"mnist5k", "digits"}
        assert pairs == {frozenset({"fashion-mnist", name}) for name in both}
