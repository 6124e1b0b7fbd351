"""What the framework relies on, checked for every part of this plugin."""

from bfl_tdamp.plugin import EMGroupSparse, EMTdamp, EMTdampPaper, GeometricMean
from bfl_tdamp.posterior import BernoulliGaussian
from bfl_tdamp.tdamp import Tdamp
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks(
    [BernoulliGaussian, Tdamp, GeometricMean, EMGroupSparse, EMTdamp, EMTdampPaper]
)
def test_conformance(check):
    check.function()
