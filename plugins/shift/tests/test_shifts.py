"""Shifts against brute force, and what they must leave alone."""

import copy
import math

import numpy as np
import pytest
import torch

from bfl_shift.settings import SETTINGS
from bfl_shift.shifts import (
    FOREIGN,
    REFERENCE,
    Samples,
    blurred,
    chosen_shifts,
    drawn,
    foreign_of,
    prior_shifted,
    resized,
    rotated,
    shifts_of,
)
from bflcore.errors import OptionError


def samples(count=6, side=9, seed=0, classes=3):
    rng = np.random.default_rng(seed)
    x = rng.random((count, 1, side, side)).astype(np.float32)
    return Samples(x, np.arange(count) % classes)


def turned(image, angle):
    """Turn an image by `angle` about its centre, pixel by pixel, with bilinear weights."""
    side, result = len(image), np.zeros_like(image, np.float64)
    cos, sin, middle = math.cos(angle), math.sin(angle), (len(image) - 1) / 2
    for i in range(side):
        for j in range(side):
            y = cos * (i - middle) + sin * (j - middle) + middle
            x = -sin * (i - middle) + cos * (j - middle) + middle
            if not (0 <= y <= side - 1 and 0 <= x <= side - 1):
                continue
            top, left = min(int(y), side - 2), min(int(x), side - 2)
            dy, dx = y - top, x - left
            for a, weight_y in ((top, 1 - dy), (top + 1, dy)):
                for b, weight_x in ((left, 1 - dx), (left + 1, dx)):
                    result[i, j] += weight_y * weight_x * image[a, b]
    return result


def smoothed(image, sigma):
    """Average each pixel's neighbours with normal weights, the border repeated."""
    reach, side = int(4 * sigma + 0.5), len(image)
    offsets = range(-reach, reach + 1)
    weights = {d: math.exp(-0.5 * (d / sigma) ** 2) for d in offsets}
    total = sum(weights.values()) ** 2
    result = np.zeros_like(image, np.float64)
    for i in range(side):
        for j in range(side):
            for a in offsets:
                for b in offsets:
                    y, x = min(max(i + a, 0), side - 1), min(max(j + b, 0), side - 1)
                    result[i, j] += weights[a] * weights[b] * image[y, x] / total
    return result


def test_a_rotation_equals_bilinear_interpolation_pixel_by_pixel():
    tests, rng = {0: samples(2)}, drawn(3, 0, "rotation")
    angle = rng.uniform(15, 45) * rng.choice([-1.0, 1.0])
    found = rotated(tests, 0, drawn(3, 0, "rotation")).x
    expected = [turned(image, math.radians(angle)) for image in tests[0].x[:, 0]]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)


def test_a_blur_equals_a_sum_over_neighbours():
    tests = {0: samples(2, side=14)}
    sigma = drawn(3, 0, "blur").uniform(1, 2) * 14 / 28
    found = blurred(tests, 0, drawn(3, 0, "blur")).x
    expected = [smoothed(image, sigma) for image in tests[0].x[:, 0]]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)


def test_images_that_grow_equal_those_of_torch():
    x = samples(2, side=8).x
    expected = torch.nn.functional.interpolate(torch.as_tensor(x), (28, 28), mode="bilinear")
    np.testing.assert_allclose(resized(x, (1, 28, 28)), expected.numpy(), atol=1e-5)


def test_images_that_shrink_are_smoothed_before():
    stripes = np.zeros((1, 1, 28, 28), np.float32)
    stripes[..., ::2] = 1  # finer than a pixel of 8x8
    small = resized(stripes, (1, 8, 8))
    assert small.shape == (1, 1, 8, 8)
    assert np.abs(small[..., 1:-1] - 0.5).max() < 0.1
    assert resized(stripes, (1, 28, 28)) == pytest.approx(stripes)


def test_images_with_other_channels_are_refused():
    with pytest.raises(OptionError, match="1 channels, but those of the clients have 3"):
        resized(samples().x, (3, 9, 9))


@pytest.mark.parametrize("name", ["rotation", "blur", "prior-shift", REFERENCE])
def test_a_shift_depends_on_seed_and_client_alone_and_changes_no_input(name, tiny):
    shift = shifts_of(tiny)[name]
    tests = {client: samples(12, seed=client) for client in range(3)}
    before = copy.deepcopy(tests)
    first, again = (shift.of(tests, 1, 5) for _ in range(2))
    assert np.array_equal(first.x, again.x)
    assert np.array_equal(first.y, again.y)
    for client, one in tests.items():
        assert np.array_equal(one.x, before[client].x)
        assert np.array_equal(one.y, before[client].y)
    alike = {client: samples(12) for client in range(3)}  # equal samples, other clients and seeds
    others = [shift.of(alike, client, seed).x for client, seed in ((0, 5), (1, 5), (0, 6))]
    differ = [not np.array_equal(others[0], x) for x in others[1:]]
    assert differ == [name != REFERENCE] * 2


def test_a_prior_shift_asks_for_every_class_equally_often():
    tests = {
        0: Samples(samples(30).x, np.arange(30) % 2),
        1: Samples(samples(30, seed=1).x, 2 + np.arange(30) % 3),
    }
    found = prior_shifted(tests, 0, np.random.default_rng(0))
    assert np.bincount(found.y).tolist() == [6] * 5  # 30 samples, five classes
    pool = {
        image.tobytes(): y for one in tests.values() for image, y in zip(one.x, one.y, strict=True)
    }
    assert [pool[image.tobytes()] for image in found.x] == found.y.tolist()
    assert len({image.tobytes() for image in found.x}) == len(found.x)  # none twice


def test_a_prior_shift_takes_what_the_rarest_class_has():
    tests = {0: Samples(samples(21).x, np.array([0] * 20 + [1]))}
    assert np.bincount(prior_shifted(tests, 0, np.random.default_rng(0)).y).tolist() == [1, 1]


def test_foreign_samples_are_the_same_for_all_methods_and_different_for_clients():
    images = samples(500, side=8).x
    first, again, other = (
        foreign_of(images, (1, 8, 8), 0, client, "ood-digits") for client in (0, 0, 1)
    )
    assert first.shape == (FOREIGN, 1, 8, 8)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_shifts_are_chosen_by_name_in_their_order_with_the_reference():
    found = chosen_shifts(SETTINGS["small"], "blur, rotation")
    assert [shift.name for shift in found] == [REFERENCE, "rotation", "blur"]
    assert len(chosen_shifts(SETTINGS["small"], "")) == len(shifts_of(SETTINGS["small"]))


def test_an_unknown_shift_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match=r"unknown shift 'rotations' \(did you mean rotation\?\)"):
        chosen_shifts(SETTINGS["small"], "rotations")
