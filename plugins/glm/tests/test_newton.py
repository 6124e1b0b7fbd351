"""Newton's method with a full matrix against scipy's, and conjugate gradients against LAPACK's."""

from __future__ import annotations

import pytest
import torch
from scipy import optimize

from bfl_glm.newton import conjugate_gradients, posterior_of
from bflcore import DenseGaussian
from bflcore.testing.problems import normal


@pytest.mark.parametrize("size", [1, 12])
def test_conjugate_gradients_solve_the_system(size):
    root, right = normal(size, size), normal(size, seed=1)
    matrix = root @ root.T + 0.1 * torch.eye(size)
    rough = matrix.diagonal().reciprocal()
    found = conjugate_gradients(lambda v: matrix @ v, lambda v: rough * v, right)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-8, atol=1e-8)


def test_conjugate_gradients_of_zero_are_zero():
    found = conjugate_gradients(lambda v: 2 * v, lambda v: v, torch.zeros(3).double())
    assert not found.any()


def test_where_a_step_overshoots_the_client_finds_its_own_mode():
    def loss(weights):
        return float((3 * weights).exp().sum() - 5 * weights.sum())

    def expand(point):
        grown = (3 * point).exp()
        found = type("Expanded", (), {})()
        found.loss, found.gradient, found.bend = loss(point), 3 * grown - 5, 9 * grown
        return found

    def update(around, point):
        precision = 1 + around.bend
        step = -(point + around.gradient) / precision
        return DenseGaussian(point + step, precision.diag())

    start = torch.full((2,), -4.0).double()
    found, mean = posterior_of(start, 2, loss, lambda w: 0.5 * float(w @ w), expand, update)
    assert mean == pytest.approx(loss(start) / 2)
    whole = optimize.minimize_scalar(
        lambda w: loss(torch.tensor([w, w])) / 2 + w**2 / 2, bounds=(-5, 5), method="bounded"
    )
    torch.testing.assert_close(found.mean, torch.full((2,), whole.x).double(), atol=1e-4, rtol=0)
