"""How much each client counts."""

from __future__ import annotations

import pytest
import torch

from bflcore import Broadcast, Equal, Examples, Point
from bflcore.testing.problems import gaussian, normal
from bflcore.weighting import check_weights


def clients(family, dtype=torch.float64):
    """Return four posteriors over six parameters and what they started from."""
    if family == "point":
        return Point(normal(4, 6, dtype=dtype)), Point(normal(6, seed=7, dtype=dtype))
    return gaussian(4, 6, dtype=dtype), gaussian(6, seed=7, dtype=dtype)


def test_weights_of_which_one_is_positive_are_accepted():
    check_weights(torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64), 3)


def test_clients_weigh_as_much_as_they_have_samples():
    posteriors, prior = clients("gaussian")
    weights = Examples().weigh(posteriors, torch.tensor([5, 1, 0, 9]), Broadcast(0, prior, prior))
    assert weights.tolist() == [5.0, 1.0, 0.0, 9.0]
    assert weights.dtype == torch.float64


def test_equal_clients_weigh_the_same_whatever_they_have():
    posteriors, prior = clients("gaussian")
    weights = Equal().weigh(posteriors, torch.tensor([5, 1, 0, 9]), Broadcast(0, prior, prior))
    assert weights.tolist() == [1.0] * 4
    assert weights.dtype == torch.float64


@pytest.mark.parametrize("weighting", [Examples(), Equal()])
def test_a_local_weighting_gives_the_same_weights_client_by_client(weighting):
    posteriors, prior = clients("gaussian")
    examples, broadcast = torch.tensor([5, 1, 2, 9]), Broadcast(0, prior, prior)
    together = weighting.weigh(posteriors, examples, broadcast)
    alone = [weighting.weigh(posteriors[[k]], examples[[k]], broadcast) for k in range(4)]
    assert weighting.local
    assert torch.equal(together, torch.cat(alone))
