"""What all posterior families have in common: packing, selecting, splitting and joining."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from bflcore import DenseGaussian, Layout, Point
from bflcore.testing.problems import dense, gaussian, generator, normal

BODY = Layout.of(dense(), "2", "body")
each_family = pytest.mark.parametrize(
    "posterior",
    [
        Point(normal(3, 26)),
        gaussian(3, 26),
        DenseGaussian.arbitrary(BODY, 3, generator()),
    ],
    ids=["point", "gaussian", "dense-gaussian"],
)


def same(left, right):
    return type(left) is type(right) and all(
        torch.equal(tensor, right.pack()[name]) for name, tensor in left.pack().items()
    )


@each_family
@pytest.mark.parametrize("prefix", ["", "personal."])
def test_unpacking_inverts_packing(posterior, prefix):
    packed = posterior.pack(prefix)
    assert all(name.startswith(prefix) for name in packed)
    assert same(type(posterior).unpack(packed, prefix), posterior)


@each_family
def test_concatenating_selected_clients_gives_all_of_them_back(posterior):
    parts = [posterior[:1], posterior[[1, 2]]]
    assert same(type(posterior).concatenate(parts), posterior)
    assert same(posterior[1], posterior[[0, 1]][1])


@each_family
@pytest.mark.parametrize("sharing", ["all", "body", "head", "none"])
def test_joining_the_halves_of_a_posterior_makes_it_whole(posterior, sharing):
    layout = Layout.of(dense(), "2", sharing)
    shared, personal = posterior.split(layout)
    assert shared.mean.shape == (3, layout.shared_total)
    assert same(shared.join(personal, layout), posterior)


@each_family
def test_mapping_touches_every_tensor_and_leaves_the_original(posterior):
    before = {name: tensor.clone() for name, tensor in posterior.pack().items()}
    doubled = posterior.map(lambda tensor: 2 * tensor)
    for name, tensor in before.items():
        assert torch.equal(doubled.pack()[name], 2 * tensor)
        assert torch.equal(posterior.pack()[name], tensor)


@each_family
def test_a_posterior_cannot_be_changed(posterior):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        posterior.mean = torch.zeros(1)


@each_family
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_field_that_is_not_finite_is_a_fault(posterior, value):
    assert posterior[0].invalid() is None
    for name in posterior.pack():
        tensors = {n: t[0].clone() for n, t in posterior.pack().items()}
        tensors[name][4] = value
        assert type(posterior).unpack(tensors).invalid() == f"{name} is not finite"
