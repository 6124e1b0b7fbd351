"""What the framework relies on, checked for every part of this plugin."""

from bfl_swag.plugin import FederatedSWAG
from bfl_swag.swag import SWAG
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([SWAG, FederatedSWAG])
def test_conformance(check):
    check.function()
