"""Gaussians with a diagonal plus low-rank precision: against the same ones with a full matrix."""

from __future__ import annotations

import pytest
import torch

from bflcore import DenseGaussian, Layout, LowRankGaussian
from bflcore.testing.problems import generator, normal

SIZE, RANK = 7, 3


def low_rank(*clients, seed=0, size=SIZE, rank=RANK):
    """Draw posteriors ``[*clients, size]`` in one basis; some cores have negative eigenvalues."""
    root = normal(*clients, rank, rank, seed=seed)
    core = root @ root.mT - 0.02 * torch.eye(rank, dtype=torch.float64)
    diagonal = normal(*clients, size, seed=seed + 1).exp() + 0.5
    basis = normal(rank, size, seed=99).expand(*clients, rank, size)
    return LowRankGaussian(normal(*clients, size, seed=seed + 2), diagonal, core, basis)


def dense(q):
    """Return the same Gaussian with a matrix of all pairs."""
    return DenseGaussian(q.mean, torch.diag_embed(q.diagonal) + q.basis.mT @ q.core @ q.basis)


def test_density_divergence_and_marginals_are_those_of_the_full_matrix():
    q, p, at = low_rank(4), low_rank(4, seed=20), normal(4, SIZE, seed=9)
    assert float(torch.linalg.eigvalsh(q.core).min()) < 0
    torch.testing.assert_close(q.log_density(at), dense(q).log_density(at))
    torch.testing.assert_close(q.kl(p), dense(q).kl(dense(p)))
    torch.testing.assert_close(q.kl(p[0]), dense(q).kl(dense(p)[0]))
    for name in ("marginals", "variances"):
        for key, tensor in getattr(dense(q), name)().items():
            torch.testing.assert_close(getattr(q, name)()[key], tensor)


def test_linear_combinations_have_the_variances_of_the_full_matrix():
    q, matrix = low_rank(), normal(5, SIZE, seed=4)
    for found, due in zip(q.combinations(matrix), dense(q).combinations(matrix), strict=True):
        torch.testing.assert_close(found, due)


def test_samples_have_the_covariance_of_the_posterior():
    q = low_rank()
    root = q.sample(torch.eye(SIZE, dtype=torch.float64)) - q.mean  # rows: the root's columns
    torch.testing.assert_close(root.T @ root, dense(q).covariance)


def test_the_draws_of_one_posterior_are_those_of_its_clients_one_by_one():
    q, noise = low_rank(), normal(2, 5, SIZE, seed=3)
    wide = q.map(lambda t: t.expand(5, *t.shape))
    each = torch.stack([wide.sample(one) for one in noise])
    torch.testing.assert_close(q.sample(noise), each, rtol=1e-12, atol=1e-12)


def test_a_product_of_densities_is_that_of_the_full_matrices():
    clients = low_rank(6)
    total = {name: t.sum(0) for name, t in clients.natural().items()}
    found = low_rank().with_natural(total)
    natural = {name: t.sum(0) for name, t in dense(clients).natural().items()}
    due = DenseGaussian.from_natural(natural)
    torch.testing.assert_close(found.mean, due.mean)
    torch.testing.assert_close(dense(found).precision, due.precision)
    assert found.core.shape == (RANK, RANK)


def test_a_product_does_not_depend_on_the_order_of_the_clients():
    natural = low_rank(6).natural()
    one, other = (
        low_rank().with_natural({n: t[order].sum(0) for n, t in natural.items()})
        for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3])
    )
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-12, atol=1e-12)


def test_with_a_mean_field_core_it_is_diagonal():
    q = low_rank()
    flat = LowRankGaussian(q.mean, q.diagonal, torch.zeros_like(q.core), q.basis)
    torch.testing.assert_close(flat.marginals()["variance"], 1 / q.diagonal)


def test_a_core_that_is_far_larger_than_the_diagonal_loses_no_more_digits_than_its_shift():
    q = low_rank()
    stiff = LowRankGaussian(q.mean, q.diagonal, 1e9 * (q.core + torch.eye(RANK)), q.basis)
    again = stiff.with_natural(stiff.natural())
    sd = stiff.marginals()["variance"].sqrt()
    # A shift P m whose rounding is e moves the mean by at most |e| sd, in standard deviations.
    rounding = torch.finfo(torch.float64).eps * torch.linalg.matrix_norm(dense(stiff).precision, 2)
    bound = float(rounding * q.mean.norm() * sd.max())
    assert bound < 1e-4
    assert float(((again.mean - q.mean) / sd).abs().max()) < bound


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"diagonal": -torch.ones(SIZE)}, "diagonal is not positive"),
        ({"core": -1e3 * torch.eye(RANK)}, "precision is not positive definite"),
        ({"core": torch.tensor([[1.0, 0, 0], [0.1, 1, 0], [0, 0, 1]])}, "core is not symmetric"),
        ({"mean": torch.full((SIZE,), torch.nan)}, "mean is not finite"),
        ({"basis": torch.full((RANK, SIZE), torch.inf)}, "basis is not finite"),
    ],
)
def test_what_is_not_a_gaussian_is_invalid(change, reason):
    q = low_rank()
    assert q.invalid() is None
    changed = {name: tensor.double() for name, tensor in change.items()}
    assert LowRankGaussian.unpack(q.pack() | changed).invalid() == reason


def test_an_improper_factor_has_no_mean():
    q = low_rank(2)
    natural = q.natural() | {"core": q.core - 1e3 * torch.eye(RANK) * torch.tensor([[[0]], [[1]]])}
    found = q.with_natural(natural)
    assert found[0].invalid() is None
    assert found[1].mean.isnan().all()


def test_a_basis_of_more_rows_than_parameters_is_allowed():
    q = low_rank(2, size=2, rank=4)
    torch.testing.assert_close(q.kl(q), torch.zeros(2).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(q.with_natural(q.natural()).mean, q.mean)


def test_rows_of_zeros_in_the_basis_do_not_count():
    q = low_rank(3)
    basis = torch.cat([q.basis, torch.zeros(3, 2, SIZE)], 1)
    core = torch.nn.functional.pad(q.core, (0, 2, 0, 2))
    wide = LowRankGaussian(q.mean, q.diagonal, core, basis)
    torch.testing.assert_close(wide.marginals()["variance"], q.marginals()["variance"])


def test_the_personal_half_has_the_diagonal_of_its_precision():
    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False))
    layout = Layout.of(network, head="1", sharing="body")
    q = low_rank(size=3)
    shared, personal = q.split(layout)
    precision = dense(q).precision
    torch.testing.assert_close(dense(shared).precision, precision[:2, :2])
    torch.testing.assert_close(dense(personal).precision, precision[2:, 2:].diagonal().diag())


def test_nothing_shared_is_a_posterior_too():
    q = low_rank(2)
    nothing = LowRankGaussian(q.mean[:, :0], q.diagonal[:, :0], q.core, q.basis[..., :0])
    again = nothing.with_natural(nothing.natural())
    assert again[0].invalid() is None
    assert again.mean.shape == (2, 0)


def test_a_core_is_raised_only_in_the_directions_that_lack_precision():
    q, mean = low_rank(2), normal(2, SIZE, seed=8)
    least = q.natural()
    vectors = torch.linalg.qr(normal(RANK, RANK, seed=9)).Q
    gap = vectors @ torch.diag(torch.tensor([1.0, -0.3, -2.0]).double()) @ vectors.T
    factor = dict(least) | {"core": least["core"] + torch.stack([gap, torch.eye(RANK).double()])}
    found, raised = q.at_least(factor, least, mean)
    assert raised.tolist() == [2, 0]
    excess = torch.linalg.eigvalsh(found["core"][0] - least["core"][0])
    torch.testing.assert_close(excess, torch.tensor([0.0, 0.0, 1.0]).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(q.with_natural(found)[0].mean, mean[0])
    assert all(torch.equal(found[name][1], factor[name][1]) for name in factor)


def test_a_diagonal_is_raised_to_the_bound():
    q, mean = low_rank(2), normal(2, SIZE, seed=8)
    least = q.natural()
    diagonal = least["diagonal"].clone()
    diagonal[1, 2] = -1.0
    found, raised = q.at_least(dict(least) | {"diagonal": diagonal}, least, mean)
    assert raised.tolist() == [0, 1]
    assert torch.equal(found["diagonal"], least["diagonal"])
    torch.testing.assert_close(q.with_natural(found)[1].mean, mean[1])


def test_a_core_that_the_diagonal_makes_up_for_is_rounding():
    q, mean = low_rank(1), normal(1, SIZE, seed=8)
    tiny = {name: 1e-12 * tensor for name, tensor in q.natural().items()}
    factor = q.natural() | {"core": -1e-9 * torch.eye(RANK).double()[None]}
    found, raised = q.at_least(factor, tiny, mean)
    assert raised.tolist() == [0]
    assert torch.equal(found["core"], factor["core"])


def test_arbitrary_posteriors_differ_in_all_but_the_basis():
    layout = Layout.of(torch.nn.Linear(2, 2))
    found = LowRankGaussian.arbitrary(layout, 4, generator())
    assert all(one.invalid() is None for one in (found[row] for row in range(4)))
    assert torch.equal(found.basis[0], found.basis[3])
    assert not torch.equal(found.core[0], found.core[3])
