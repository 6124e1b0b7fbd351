"""Point estimates."""

from __future__ import annotations

import math

import torch

from bflcore import Point
from bflcore.testing.problems import normal


def test_a_sample_of_a_point_is_the_point():
    point = Point(normal(5))
    assert torch.equal(point.sample(normal(4, 5)), point.mean.repeat(4, 1))


def test_points_diverge_infinitely_unless_they_coincide():
    points = Point(torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
    assert points.kl(Point(torch.tensor([1.0, 2.0]))).tolist() == [0.0, math.inf]
