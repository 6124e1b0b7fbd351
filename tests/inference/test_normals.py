"""Noise for cohorts: normal out to the tails, and each client's own."""

import pytest
import torch
from scipy import stats

from bflcore.inference.normals import Noise
from bflcore.testing.problems import generator

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_standard_normal_out_to_the_tails(dtype):
    count = 4_000_000
    drawn = Noise([generator(1)]).fill(torch.empty(1, count, dtype=dtype))[0].double()
    assert stats.kstest(drawn[:200_000].numpy(), "norm").pvalue > 0.001
    for limit in (3.0, 4.3, 4.6):
        expected = count * stats.norm.sf(limit)
        for beyond in (int((drawn > limit).sum()), int((drawn < -limit).sum())):
            assert abs(beyond - expected) < 4 * expected**0.5  # a Poisson count's deviation


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_clients_noise_does_not_depend_on_the_others(dtype):
    sizes = (5, 3, 1)
    shape = (5, 7)
    cohort = Noise([generator(seed) for seed in range(3)])
    for _ in range(2):  # the second draw continues the first
        together = cohort.fill(torch.zeros(3, *shape, dtype=dtype), sizes)
        assert bool((together[1, 3:] == 0).all())  # padding is not drawn
    for seed, size in enumerate(sizes):
        alone = Noise([generator(seed)])
        for _ in range(2):
            found = alone.fill(torch.zeros(1, size, 7, dtype=dtype))[0]
        assert torch.equal(together[seed, :size], found)


def test_the_first_rows_of_a_cohort_can_draw_without_the_others():
    whole = Noise([generator(0), generator(1)])
    first = Noise([generator(0)])
    assert torch.equal(whole.fill(torch.empty(1, 40)), first.fill(torch.empty(1, 40)))
