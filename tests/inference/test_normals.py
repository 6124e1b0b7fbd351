"""The source of standard normals: whose they are, and how they are distributed."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from bflcore.inference.normals import Noise
from bflcore.randomness import stream


def noise(*clients):
    return Noise([stream(0, 0, client, "noise") for client in clients])


def filled(source, *shape, sizes=()):
    return source.fill(torch.zeros(*shape, dtype=torch.float64), sizes)


def test_a_row_is_what_its_client_draws_alone():
    together = filled(noise(0, 1, 2), 3, 4, 5)
    for client in range(3):
        assert torch.equal(together[client], filled(noise(client), 1, 4, 5)[0])


def test_a_client_with_fewer_samples_draws_for_those_alone():
    together = filled(noise(0, 1), 2, 4, 5, sizes=(4, 3))
    assert torch.equal(together[1, :3], filled(noise(1), 1, 3, 5)[0])
    assert not together[1, 3:].any()


def test_draws_go_on_where_the_last_ones_ended():
    source = noise(0)
    first, second = filled(source, 1, 8), filled(source, 1, 8)
    assert not torch.isin(first, second).any()
    assert torch.equal(filled(noise(0), 1, 16), torch.cat([first, second], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_standard_normal(dtype):
    draws = noise(0).fill(torch.empty(1, 200_000, dtype=dtype))[0].double()
    assert draws.isfinite().all()
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-3
    assert abs(float(draws.mean())) < 5 / 200_000**0.5
    assert abs(float(draws.var()) - 1) < 5 * (2 / 200_000) ** 0.5
