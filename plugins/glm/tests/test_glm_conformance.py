"""What the framework relies on, checked for every part of this plugin."""

from bfl_glm.low_rank import LowRankLaplace
from bfl_glm.plugin import GLM
from bfl_glm.sites import Laplace, LinearGaussian
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([LinearGaussian, Laplace, LowRankLaplace, GLM])
def test_conformance(check):
    check.function()
