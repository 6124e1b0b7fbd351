"""Posterior families: what a client knows about each parameter."""

from bflcore.posteriors.base import ExponentialFamily, Posterior
from bflcore.posteriors.dense import DenseGaussian
from bflcore.posteriors.gaussian import Gaussian
from bflcore.posteriors.low_rank import LowRankGaussian
from bflcore.posteriors.point import Point

__all__ = [
    "DenseGaussian",
    "ExponentialFamily",
    "Gaussian",
    "LowRankGaussian",
    "Point",
    "Posterior",
]
