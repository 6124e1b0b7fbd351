"""Windows of a tape: normal in each step, new to each parameter, and each client's own."""

import pytest
import torch
from scipy import stats

from bfl_ivon.noise import FEW, WindowedNoise
from bflcore.testing.problems import generator

LENGTH = 17_000


def source(seeds, windows, length=LENGTH):
    like = torch.empty(len(seeds), length)
    return WindowedNoise([generator(seed) for seed in seeds], like, windows)


def draw(noise, k):
    return torch.stack([eps * sign for eps, sign in noise.rows(k)])


@pytest.mark.parametrize("windows", [1, 4])
def test_the_noise_of_every_step_is_standard_normal(windows):
    noise = source([1], windows)
    for _ in range(6):
        assert stats.kstest(draw(noise, 1)[0].numpy(), "norm").pvalue > 1e-3


def test_a_parameter_meets_other_numbers_in_every_step():
    noise = source([1], 16)
    steps = torch.stack([draw(noise, 1)[0] for _ in range(16)])
    for one in range(16):
        for other in range(one):
            assert not bool((steps[one].abs() == steps[other].abs()).any())
            # The mean of 17,000 products of independent normals has a deviation of 0.008.
            assert abs(float((steps[one] * steps[other]).mean())) < 5 * LENGTH**-0.5


def test_a_tape_serves_so_many_steps_and_no_more():
    noise = source([1], 3)
    steps = [draw(noise, 1)[0].abs() for _ in range(6)]
    early, late = (set(torch.cat(some).tolist()) for some in (steps[:3], steps[3:]))
    assert len(early) <= 2 * LENGTH
    assert len(early & late) < 0.02 * LENGTH  # float32 normals are sometimes equal by chance


def test_signs_are_both_drawn():
    noise = source([1], 64)
    assert {sign for _ in range(64) for _, sign in noise.rows(1)} == {-1, 1}


@pytest.mark.parametrize("windows", [1, 3])
def test_a_clients_noise_does_not_depend_on_the_others(windows):
    together, counts = source([1, 2], windows), (9, 5)
    seen = [[], []]
    for step in range(max(counts)):
        k = sum(step < count for count in counts)
        for row, eps in enumerate(draw(together, k)):
            seen[row].append(eps)
    for row, count in enumerate(counts):
        alone = source([row + 1], windows)
        for step in range(count):
            assert torch.equal(draw(alone, 1)[0], seen[row][step])


def test_few_parameters_get_new_noise_in_each_step():
    noise, plain = source([1], 16, FEW - 1), generator(1)
    for _ in range(3):
        expected = torch.empty(FEW - 1).normal_(generator=plain)
        assert torch.equal(draw(noise, 1)[0], expected)
