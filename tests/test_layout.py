"""The layout: one flat vector, and which of its coordinates travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bflcore import Layout
from bflcore.errors import OptionError
from bflcore.testing.problems import dense, normal


class HeadInTheMiddle(nn.Module):
    """Registers its head between two other layers, beside one whose name begins alike."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.head = nn.Linear(2, 2)
        self.header = nn.Linear(2, 1)


SIZES = {"first": 8, "head": 6, "header": 3}


def layout(sharing):
    return Layout.of(HeadInTheMiddle(), "head", sharing)


def travelling(sharing):
    """Return a mask over the flat vector, written out by hand."""
    mask = {
        "all": (True, True, True),
        "none": (False, False, False),
        "head": (False, True, False),
        "body": (True, False, True),
    }[sharing]
    return np.repeat(mask, list(SIZES.values()))


each_sharing = pytest.mark.parametrize("sharing", ["all", "body", "head", "none"])


def test_flattening_follows_the_order_of_registration():
    network = dense()
    flat = Layout.of(network).flatten(dict(network.named_parameters()))
    expected = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    assert torch.equal(flat, expected)


def test_unflattening_inverts_flattening():
    vector = normal(17)
    tensors = layout("all").unflatten(vector)
    assert torch.equal(layout("all").flatten(tensors), vector)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: tuple(p.shape) for name, p in HeadInTheMiddle().named_parameters()
    }


def test_unflattening_copies_nothing():
    vector = torch.zeros(17)
    layout("all").unflatten(vector)["head.bias"][1] = 3.0
    assert vector.tolist() == [0.0] * 13 + [3.0] + [0.0] * 3


def test_a_flattened_vector_is_not_the_networks_own_memory():
    network = nn.Linear(2, 1, bias=False)
    flat = Layout.of(network).flatten(dict(network.named_parameters()))
    flat.zero_()
    assert not flat.requires_grad
    assert bool((network.weight != 0).any())


def test_slices_find_each_tensor_in_the_vector():
    vector = normal(17)
    for name, tensor in layout("all").unflatten(vector).items():
        assert torch.equal(vector[layout("all").slices[name]], tensor.reshape(-1))


@each_sharing
def test_splitting_divides_at_layer_boundaries(sharing):
    vector = normal(17)
    shared, personal = layout(sharing).split(vector)
    mask = travelling(sharing)
    assert np.array_equal(shared, vector.numpy()[mask])
    assert np.array_equal(personal, vector.numpy()[~mask])


@each_sharing
@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_joining_inverts_splitting(sharing, leading):
    vector = normal(*leading, 17)
    assert torch.equal(layout(sharing).join(*layout(sharing).split(vector)), vector)


@each_sharing
def test_totals_count_what_travels_and_what_stays(sharing):
    mask = travelling(sharing)
    assert layout(sharing).total == 17
    assert layout(sharing).shared_total == mask.sum()
    assert layout(sharing).personal_total == (~mask).sum()


def test_joining_gives_the_servers_coordinates_to_every_client():
    shared, personal = normal(11), normal(4, 6, seed=1)
    whole = layout("body").join(shared, personal)
    for client in range(4):
        assert torch.equal(whole[client], layout("body").join(shared, personal[client]))


def test_adjacent_tensors_of_equal_sharing_are_one_run():
    assert layout("body").runs == [(True, 8), (False, 6), (True, 3)]
    assert layout("all").runs == [(True, 17)]


def test_a_half_that_is_one_run_is_a_view():
    vector = normal(17)
    assert layout("body").split(vector)[1].data_ptr() == vector[8:].data_ptr()
    assert layout("all").split(vector)[0].data_ptr() == vector.data_ptr()


def test_an_unknown_sharing_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match=r"--share.*'boddy'.*did you mean body.*all, body, head"):
        Layout.of(dense(), "2", "boddy")
