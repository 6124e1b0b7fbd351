"""What the framework relies on, checked for every part of this plugin."""

from bfl_superfed.plugin import SuPerFedLM, SuPerFedMM
from bfl_superfed.superfed import LowLossSubspace
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([LowLossSubspace, SuPerFedMM, SuPerFedLM])
def test_conformance(check):
    check.function()
