"""The Laplace posterior against closed forms, brute force and laplace-torch."""

import itertools
import math
import warnings

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from bfl_fedsi import laplace
from bfl_fedsi.fedsi import SubnetworkLaplace, SubnetworkMemory
from bflcore import Broadcast, GaussianNoise, OptionError
from bflcore.testing.problems import cohort, convolutional, dense, first_broadcast, normal, problem

DOUBLE = torch.float64


def prior_of(of, seed=5):
    return normal(of.layout.shared_total, seed=seed).exp()


def infer(of, inference, g=None, weights=None, noise=1.0):
    g = prior_of(of) if g is None else g
    weights = of.initial if weights is None else weights
    noise = torch.tensor(noise, dtype=DOUBLE)
    stream = torch.Generator().manual_seed(0)
    x = of.train.of(0)[0]
    return inference.subnetwork(of, weights, x, noise, g, inference.select, stream)


def covariance(found):
    on_s = found.base[found.index].diag()
    return on_s + found.sign * found.factor.T @ found.factor


def rows(of, noise=1.0):
    """A = L^T J ``[n O, R]`` from the library's own Jacobian, which has its own tests."""
    x = of.train.of(0)[0]
    noise = torch.tensor(noise, dtype=DOUBLE)
    everything = torch.arange(of.layout.shared_total)
    blocks = laplace.weighted(of, of.initial, x, noise, 1)
    return torch.cat([block.columns(everything).flatten(0, 1) for block in blocks])


def linear_regression(sharing="all"):
    return problem(
        nn.Sequential(nn.Linear(3, 2)), sizes=(9,), head="0", sharing=sharing,
        likelihood=GaussianNoise(noise_variance=0.3),
    )  # fmt: skip


def exact(of, g, noise):
    """Bayesian linear regression by numpy: covariance of [W row by row, b], both outputs."""
    x, y = (t.numpy() for t in of.train.of(0))
    blank = np.zeros_like(x)
    one, zero = np.ones((len(x), 1)), np.zeros((len(x), 1))
    first = np.hstack([x, blank, one, zero])
    second = np.hstack([blank, x, zero, one])
    design, target = np.vstack([first, second]), np.concatenate([y[:, 0], y[:, 1]])
    precision = design.T @ design / noise + np.diag(1 / g.numpy())
    return np.linalg.inv(precision), design, target


@pytest.mark.parametrize("side", ["auto", "primal", "dual"])
def test_on_a_linear_gaussian_model_it_is_bayesian_linear_regression(side):
    of = linear_regression()
    g = prior_of(of)
    found = infer(of, SubnetworkLaplace(fraction=1, covariance=side), g, noise=0.3)
    expected, design, _ = exact(of, g, 0.3)
    torch.testing.assert_close(covariance(found), torch.from_numpy(expected))
    torch.testing.assert_close(found.variance, torch.from_numpy(np.diag(expected).copy()))
    _, spread = laplace.linearise(of, of.initial, found, of.train.of(0)[0])
    predicted = np.einsum("na,ab,nb->n", design, expected, design)
    torch.testing.assert_close(spread[:, 0, 0], torch.from_numpy(predicted[:9].copy()))
    torch.testing.assert_close(spread[:, 1, 1], torch.from_numpy(predicted[9:].copy()))


def test_the_map_of_a_linear_gaussian_model_is_the_posterior_mean():
    of = linear_regression()
    g = prior_of(of) * 0.2
    inference = SubnetworkLaplace(
        fraction=1, lr=0.05, optimiser="sgd", batch_size=100, local_epochs=3000
    )
    sent = first_broadcast(inference, of)
    from bflcore import Gaussian

    prior = Gaussian(normal(len(g), seed=3), g)
    fitted = inference.fit(of, Broadcast(0, sent.start, prior), cohort(of, inference))
    expected, design, target = exact(of, g, 0.3)
    pulled = design.T @ target / 0.3 + (prior.mean / g).numpy()
    torch.testing.assert_close(fitted.posterior.mean[0], torch.from_numpy(expected @ pulled))
    torch.testing.assert_close(
        fitted.posterior.variance[0], torch.from_numpy(np.diag(expected).copy())
    )


NETWORKS = {
    "dense": lambda: problem(sizes=(6,), sharing="body"),
    "convolutional": lambda: problem(
        convolutional(), (6,), (2, 4, 4), head="4", sharing="body"
    ),
}  # fmt: skip


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("side", ["auto", "primal", "dual"])
def test_every_side_gives_the_inverse_of_the_precision(network, fraction, side):
    of = NETWORKS[network]()
    g = prior_of(of)
    found = infer(of, SubnetworkLaplace(fraction=fraction, covariance=side, select="random"), g)
    assert len(found.index) == max(1, round(fraction * len(g)))
    a = rows(of)[:, found.index]
    precision = a.T @ a + (1 / g[found.index]).diag()
    expected = torch.linalg.inv(precision)
    torch.testing.assert_close(covariance(found), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found.variance[found.index], expected.diagonal(), rtol=1e-4, atol=1e-6
    )
    outside = torch.ones(len(g), dtype=torch.bool).index_fill(0, found.index, False)
    assert (found.variance[outside] == 0).all()


def test_the_smaller_side_is_taken():
    of = problem(sizes=(6,), sharing="all")  # 12 rows, 26 parameters
    many = infer(of, SubnetworkLaplace(fraction=1, select="random"))
    few = infer(of, SubnetworkLaplace(fraction=0.2, select="random"))
    assert (many.sign, many.factor.shape) == (-1, (12, 26))
    assert (few.sign, few.factor.shape) == (1, (5, 5))


def test_dropped_rows_change_no_variance_by_more_than_is_promised():
    of = problem(sizes=(40,), sharing="all")
    confident = of.initial * 8
    g = prior_of(of)
    found = infer(of, SubnetworkLaplace(fraction=1, covariance="dual"), g, confident)
    assert len(found.factor) < 80
    x = of.train.of(0)[0]
    everything = torch.arange(len(g))
    one = torch.ones((), dtype=DOUBLE)
    blocks = laplace.weighted(of, confident, x, one, 1)
    a = torch.cat([block.columns(everything).flatten(0, 1) for block in blocks])
    full = torch.linalg.inv(a.T @ a + (1 / g).diag()).diagonal()
    ratio = found.variance / full
    assert (ratio >= 1 - 1e-9).all()
    assert (ratio <= 1 + 1.01 * laplace.NEGLIGIBLE).all()


def test_the_factor_of_the_curvature_is_right():
    of = problem()
    outputs = normal(5, 2, seed=4)
    factor = laplace.curvature_factor(of, outputs, torch.ones(()))
    p = outputs.softmax(1)
    expected = p.diag_embed() - p[:, :, None] * p[:, None]
    torch.testing.assert_close(factor @ factor.mT, expected)


def test_the_diagonal_is_that_of_the_gauss_newton_matrix():
    of = problem(sharing="body")
    h = laplace.diagonal(of, of.initial, of.train.of(0)[0], torch.ones((), dtype=DOUBLE))
    torch.testing.assert_close(h, rows(of).square().sum(0))


def wasserstein(variance, kept):
    """Squared 2-Wasserstein distance of a factorised Gaussian to itself made certain outside."""
    return sum(v for r, v in enumerate(variance) if r not in kept)


def test_the_selection_minimises_the_wasserstein_distance_over_all_subnetworks():
    h, g = normal(9, seed=1).square(), normal(9, seed=2).exp()
    variance = [1 / (a + 1 / b) for a, b in zip(h.tolist(), g.tolist(), strict=True)]
    chosen = laplace.select("variance", h, g, 3, torch.Generator())
    best = min(itertools.combinations(range(9), 3), key=lambda kept: wasserstein(variance, kept))
    assert tuple(chosen.tolist()) == best


def test_the_curvature_aware_selection_passes_over_parameters_without_curvature():
    h = torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0])
    g = torch.tensor([9.0, 1.0, 1.0, 8.0, 1.0])

    def chosen(rule, count):
        return laplace.select(rule, h, g, count, torch.Generator()).tolist()

    assert chosen("variance", 2) == [0, 3]
    assert chosen("curvature-aware", 2) == [2, 4]
    assert chosen("curvature-aware", 4) == [0, 1, 2, 4]  # those without are the last resort
    assert chosen("informative", 2) == [1, 4]


def test_a_random_selection_is_a_sample_that_its_stream_decides():
    h, g = torch.rand(50), torch.ones(50)

    def chosen(seed):
        generator = torch.Generator().manual_seed(seed)
        return laplace.select("random", h, g, 20, generator)

    assert len(chosen(0).unique()) == 20
    assert torch.equal(chosen(0), chosen(0))
    assert not torch.equal(chosen(0), chosen(1))


def test_the_factorised_posterior_leaves_correlations_out():
    of = problem(sizes=(6,), sharing="body")
    g = prior_of(of)
    found = infer(of, SubnetworkLaplace(fraction=1, covariance="diagonal"), g)
    h = rows(of).square().sum(0)
    torch.testing.assert_close(found.variance, 1 / (h + 1 / g))
    _, spread = laplace.linearise(of, of.initial, found, of.train.of(0)[0])
    one = torch.ones((), dtype=DOUBLE)
    j = next(laplace.blocks(of, of.initial, of.train.of(0)[0], 1)).columns(torch.arange(len(g)))
    torch.testing.assert_close(spread, (j * found.variance) @ j.mT)
    assert one


def test_cholesky_needs_the_lower_triangle_alone_which_is_formed_in_strips(monkeypatch):
    monkeypatch.setattr(laplace, "STRIP", 3)
    first, second = normal(9, 8, seed=1), normal(5, 8, seed=2)
    gram = torch.zeros(8, 8, dtype=DOUBLE)
    for rows in (first, second):
        laplace.add_gram(gram, rows)
    expected = first.T @ first + second.T @ second
    torch.testing.assert_close(gram.tril(), expected.tril())
    assert not gram[:3, 3:].any()
    torch.testing.assert_close(laplace.cholesky(gram), torch.linalg.cholesky(expected))


def test_a_matrix_that_is_barely_indefinite_gets_a_jitter_and_a_warning():
    matrix = torch.diag(torch.tensor([1.0, 1.0, -1e-8], dtype=DOUBLE))
    with pytest.warns(RuntimeWarning, match="1e-07 of its mean diagonal"):
        lower = laplace.cholesky(matrix)
    torch.testing.assert_close(lower @ lower.T, matrix, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_matrix_beyond_help_is_an_error_that_says_what_to_do(bad):
    matrix = torch.diag(torch.tensor([1.0, bad], dtype=DOUBLE))
    with pytest.raises(OptionError, match="smaller prior variance, or --dtype float64"):
        laplace.cholesky(matrix)


@pytest.mark.parametrize("network", ["dense", "convolutional"])
@pytest.mark.parametrize("side", ["primal", "dual"])
def test_precision_covariance_and_predictions_are_those_of_laplace_torch(network, side):
    from bflcore.data.torchvision_import import torchvision

    torchvision()  # laplace-torch imports it, and it may need help to load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("laplace")
        if network == "dense":
            of = problem(dense(), (12,), sharing="all")
        else:
            of = problem(convolutional(), (12,), (2, 4, 4), head="4", sharing="all")
        alpha = 0.7
        g = torch.full_like(of.initial, alpha)
        inference = SubnetworkLaplace(fraction=0.4, covariance=side, select="informative")
        found = infer(of, inference, g)
        x, y = of.train.of(0)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
        theirs = peer.FullSubnetLaplace(
            of.network, "classification", found.index, prior_precision=1 / alpha
        )
        theirs.fit(loader)
        expected = theirs(x, link_approx="probit").detach()
        precision, spread = theirs.posterior_precision, theirs.posterior_covariance
    close = {"rtol": 1e-4, "atol": 1e-7}
    torch.testing.assert_close(torch.linalg.inv(covariance(found)), precision, **close)
    torch.testing.assert_close(covariance(found), spread, **close)
    memory = SubnetworkMemory.of(torch.ones(1, dtype=DOUBLE), [found]).pack()
    members = attrs.evolve(cohort(of, inference), memory=memory)
    ours = inference.predict(of, first_broadcast(inference, of), members, x[None])
    torch.testing.assert_close(ours.mean[0], expected, **close)
