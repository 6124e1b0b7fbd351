"""SWAG against the moments of a path that is walked by hand."""

import pytest
import torch

from bfl_swag.swag import SWAG, Path
from bflcore.testing import problems


def fitted(inference, sizes):
    of = problems.separable(sizes)
    cohort = problems.cohort(of, inference)
    return of, cohort, inference.fit(of, problems.first_broadcast(inference, of), cohort)


def test_a_path_has_the_moments_of_its_points():
    points = torch.randn(5, 2, 3, dtype=torch.float64)
    path = Path.of(torch.zeros(2, 3, dtype=torch.float64))
    for point in points:
        path.record(point, torch.ones(2).double())
    torch.testing.assert_close(path.mean, points.mean(0))
    torch.testing.assert_close(path.variance, points.var(0, correction=0))


@pytest.mark.parametrize(("burn_in", "recorded"), [(0.0, [0, 1, 2, 3]), (0.5, [2, 3])])
def test_full_batch_descent_gives_the_moments_of_the_iterates(burn_in, recorded):
    options = {"optimiser": "sgd", "lr": 0.1, "local_epochs": 4, "batch_size": 100}
    of, cohort, result = fitted(SWAG(burn_in=burn_in, **options), (12,))
    weights, iterates = of.initial.clone().requires_grad_(), []
    for _ in range(4):
        loss = of.likelihood.nll(of.forward(weights[None], cohort.x)[0], cohort.y[0]).mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - 0.1 * gradient).detach().requires_grad_()
        iterates.append(weights.detach())
    path = torch.stack([iterates[step] for step in recorded])
    torch.testing.assert_close(result.posterior.mean[0], path.mean(0))
    torch.testing.assert_close(result.posterior.variance[0], path.var(0, correction=0))


def test_scale_multiplies_variances_alone():
    _, _, one = fitted(SWAG(), (12,))
    _, _, four = fitted(SWAG(scale=4.0), (12,))
    torch.testing.assert_close(four.posterior.mean, one.posterior.mean)
    torch.testing.assert_close(four.posterior.variance, 4 * one.posterior.variance)
