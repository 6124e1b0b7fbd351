"""The fixed cases of the laws: from one client to more than a rule takes in at once."""

import torch

from bflcore.aggregation import CLIENTS, COORDINATES
from bflcore.testing.aggregation_cases import cases, with_mean


def test_there_are_cases_with_one_client_many_clients_and_many_parameters():
    found = list(cases(("point", "gaussian")))
    sizes = {tuple(case.posteriors.mean.shape) for case in found}
    assert min(clients for clients, _ in sizes) == 1
    assert max(clients for clients, _ in sizes) > 2 * CLIENTS
    assert max(parameters for _, parameters in sizes) > COORDINATES
    assert {case.posteriors.name for case in found} == {"point", "gaussian"}
    assert {case.prior.mean.dtype for case in found} == {torch.float32, torch.float64}


def test_every_case_is_valid_and_its_prior_is_wider_than_its_clients():
    for case in cases():
        assert all(one.invalid() is None for one in map(case.posteriors.__getitem__, [0, -1]))
        assert bool((case.prior.variance >= case.posteriors.variance.amax(0)).all())
        assert bool((case.weights > 0).all())


def test_a_case_is_cut_to_clients_and_its_means_are_mapped():
    case = next(case for case in cases() if len(case.weights) == 3)
    rows = case.rows([2, 0])
    assert torch.equal(rows.posteriors.mean, case.posteriors.mean[[2, 0]])
    assert torch.equal(rows.weights, case.weights[[2, 0]])
    moved = case.map_means(lambda mean: mean + 1)
    assert torch.equal(moved.prior.mean, case.prior.mean + 1)
    assert torch.equal(moved.posteriors.variance, case.posteriors.variance)
    assert torch.equal(with_mean(case.prior, torch.neg).mean, -case.prior.mean)
