"""The toy problems, and how things of tensors are compared."""

import pytest
import torch

from bflcore import Map
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import (
    IMAGE,
    assert_same,
    build,
    cohort,
    convolutional,
    copies,
    difference,
    first_broadcast,
    gaussian,
    normal,
    problem,
    separable,
    shapes,
)


def test_clients_hold_as_many_samples_as_asked_for():
    of = problem(sizes=(4, 1, 6), novel=(1,))
    assert [of.train.size(client) for client in range(3)] == [4, 1, 6]
    assert (of.clients, of.novel) == ((0, 2), (1,))
    images = problem(convolutional(), shape=IMAGE, head="4")
    assert images.train.x.shape == (14, *IMAGE)


def test_a_problem_is_the_same_whenever_it_is_made():
    for make in (problem, separable):
        assert_same(make().train, make().train, "samples", 0.0)
        assert torch.equal(make().initial, make().initial)


def test_the_separable_problem_can_be_learnt():
    of, inference = separable(), build(Map, local_epochs=60, lr=0.05)
    members, sent = cohort(of, inference), first_broadcast(inference, of)
    result = inference.fit(of, sent, members)
    outputs = of.forward(result.posterior.mean, members.x)
    right = outputs[0].argmax(-1) == members.y[0]
    assert right.double().mean() > 0.85


def test_a_cohort_is_everybody_from_the_largest_to_the_smallest():
    of = problem(sizes=(2, 7, 5), novel=(1,))
    assert cohort(of, Map()).clients == (1, 2, 0)
    assert cohort(of, Map(), [2, 0]).clients == (2, 0)


def test_the_first_broadcast_is_that_of_a_run():
    of, inference = problem(sharing="body"), Map()
    expected = begin(Recipe(inference, None, None, None), of)
    assert_same(first_broadcast(inference, of), expected, "broadcast", 0.0)


def test_a_difference_names_the_place_and_both_values():
    left, right = {"a": normal(2, 3)}, {"a": normal(2, 3)}
    assert difference(left, right) == ""
    right["a"][1, 2] = 7
    assert difference(left, right).startswith("a[1, 2] is ")
    assert difference(left, right).endswith("not 7")
    assert "instead of" in difference(left, {"b": left["a"]})
    assert "float32" in difference(left, {"a": left["a"].float()})
    with pytest.raises(AssertionError, match="both: a"):
        assert_same(left, right, "both")


def test_nans_equal_themselves_and_copies_stay_as_they_were():
    q = gaussian(3)
    q.mean[0] = torch.nan
    (before,) = copies(q)
    assert difference(q, before) == ""
    q.mean[1] = 9
    assert difference(q, before).startswith("mean[1] is 9")
    assert shapes(q) == {"mean": "float64 [3]", "variance": "float64 [3]"}


def test_lists_are_compared_element_by_element():
    one = [{"a": torch.zeros(2)}, {"a": torch.ones(2)}]
    assert difference(one, [dict(part) for part in one]) == ""
    assert difference(one, [one[0], {"a": torch.zeros(2)}]) != ""
    assert difference(one, one[:1]) != ""
