"""What the framework relies on, checked for every part of this plugin."""

from bfl_ivon import plugin
from bflcore.testing import parametrize_with_checks

PARTS = [*plugin.bfl_inferences(), *plugin.bfl_methods()]


@parametrize_with_checks(PARTS)
def test_conformance(check):
    check.function()
