"""Barycentres minimise the divergence that they are named after."""

import pytest
import torch

from bfl_ivon.barycentre import GEOMETRIES, barycentre
from bflcore import Gaussian
from bflcore.testing.problems import gaussian

SHARE = 0.3


def reverse_kl(found, other):
    return found.kl(other)


def squared_wasserstein(found, other):
    """Olkin & Pukelsheim 1982: the squared distances of the means and of the deviations."""
    deviations = found.variance.sqrt() - other.variance.sqrt()
    return ((found.mean - other.mean).square() + deviations.square()).sum(-1)


@pytest.mark.parametrize(
    ("geometry", "distance"),
    [("reverse-kl", reverse_kl), ("wasserstein-2", squared_wasserstein)],
)
def test_the_barycentre_is_where_the_gradient_of_the_mean_distance_is_zero(geometry, distance):
    left, right = gaussian(5, seed=1), gaussian(5, seed=3)
    found = barycentre(left, right, SHARE, geometry)

    def total(one):
        return (1 - SHARE) * distance(one, left) + SHARE * distance(one, right)

    leaves = [tensor.clone().requires_grad_() for tensor in (found.mean, found.variance)]
    for gradient in torch.autograd.grad(total(Gaussian(*leaves)), leaves):
        torch.testing.assert_close(gradient, torch.zeros(5).double(), atol=1e-12, rtol=0)
    for offset in (0.1, -0.1):  # it is a minimum, and no other stationary point
        moved = Gaussian(found.mean + offset, found.variance * (1 + offset))
        assert float(total(moved)) > float(total(found))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_ends_are_the_two_posteriors_themselves(geometry):
    left, right = gaussian(2, 4, seed=1), gaussian(2, 4, seed=3)
    assert barycentre(left, right, 0.0, geometry) is left
    assert barycentre(left, right, 1.0, geometry) is right


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_barycentre_of_equals_is_what_they_are(geometry):
    one = gaussian(4, seed=1)
    found = barycentre(one, one, SHARE, geometry)
    torch.testing.assert_close(found.pack(), one.pack())
