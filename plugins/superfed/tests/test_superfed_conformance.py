"""What the framework relies on, checked for every part of this plugin."""

from bfl_superfed.plugin import LowLossSubspace, SuPerFedLM, SuPerFedMM
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([LowLossSubspace, SuPerFedMM, SuPerFedLM])
def test_conformance(check):
    check.function()
