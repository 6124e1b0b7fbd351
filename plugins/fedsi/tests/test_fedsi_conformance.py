"""What the framework relies on, checked for every part of this plugin."""

from bfl_fedsi.fedsi import SubnetworkLaplace
from bfl_fedsi.plugin import FedSI, FedSIFac
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([SubnetworkLaplace, FedSI, FedSIFac])
def test_conformance(check):
    check.function()
