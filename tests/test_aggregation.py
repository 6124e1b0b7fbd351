"""Averaging, weights, and that a sum may be taken in any order and any tree."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from bflcore import Aggregator, Average, Gaussian, Point, Posterior
from bflcore.aggregation import AdditiveAggregator, State, add_sums, slices, weighted_sum
from bflcore.errors import OptionError
from bflcore.testing.problems import gaussian, normal

WEIGHTS = torch.tensor([3.0, 1.0, 0.5, 7.0], dtype=torch.float64)


def clients(family, dtype=torch.float64):
    """Return four posteriors over six parameters and what they started from."""
    if family == "point":
        return Point(normal(4, 6, dtype=dtype)), Point(normal(6, seed=7, dtype=dtype))
    return gaussian(4, 6, dtype=dtype), gaussian(6, seed=7, dtype=dtype)


def take_in(rule, posteriors, weights, prior):
    """Return the state of clients that were added together."""
    return rule.add(rule.start(prior), posteriors, weights)


def close(left, right, **tolerance):
    assert type(left) is type(right)
    for name, tensor in left.pack().items():
        torch.testing.assert_close(tensor, right.pack()[name], **tolerance)


each_family = pytest.mark.parametrize("family", ["point", "gaussian"])
each_rule = pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("point", Average()),
        ("gaussian", Average(on="variance")),
        ("gaussian", Average(on="std")),
    ],
    ids=["point", "variance", "std"],
)


@each_family
def test_the_mean_is_the_weighted_mean(family):
    posteriors, prior = clients(family)
    fused = Average().fuse(posteriors, WEIGHTS, prior)
    np.testing.assert_allclose(fused.mean, np.average(posteriors.mean, axis=0, weights=WEIGHTS))


def test_variances_are_averaged_by_default():
    posteriors, prior = clients("gaussian")
    fused = Average().fuse(posteriors, WEIGHTS, prior)
    expected = np.average(posteriors.variance, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(fused.variance, expected)


def test_standard_deviations_are_averaged_when_asked_for():
    posteriors, prior = clients("gaussian")
    fused = Average(on="std").fuse(posteriors, WEIGHTS, prior)
    expected = np.average(posteriors.variance.sqrt(), axis=0, weights=WEIGHTS) ** 2
    np.testing.assert_allclose(fused.variance, expected)


def test_averaging_on_anything_else_is_refused():
    with pytest.raises(OptionError, match=r"on: 'precision'.*variance \| std"):
        Average(on="precision")


@each_rule
def test_fusing_one_client_returns_it(family, rule):
    posteriors, prior = clients(family)
    close(rule.fuse(posteriors[[2]], torch.tensor([0.3]), prior), posteriors[2])


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_keeps_the_priors_dtype(family, rule, dtype):
    posteriors, prior = clients(family, dtype)
    fused = rule.fuse(posteriors, WEIGHTS, prior)
    assert {t.dtype for t in fused.pack().values()} == {dtype}
    exact, start = clients(family)
    close(fused.map(lambda t: t.double()), rule.fuse(exact, WEIGHTS, start), rtol=1e-6, atol=1e-6)


@each_rule
def test_sums_are_taken_in_double_precision(family, rule):
    posteriors, prior = clients(family, torch.float32)
    assert {t.dtype for t in rule.encode(posteriors, WEIGHTS, prior).values()} == {torch.float64}


@each_rule
def test_the_prior_does_not_matter(family, rule):
    posteriors, prior = clients(family)
    moved = prior.map(lambda tensor: 3 * tensor.abs() + 1)
    close(rule.fuse(posteriors, WEIGHTS, prior), rule.fuse(posteriors, WEIGHTS, moved))


@each_rule
def test_the_scale_of_the_weights_does_not_matter(family, rule):
    posteriors, prior = clients(family)
    close(rule.fuse(posteriors, WEIGHTS, prior), rule.fuse(posteriors, 1e-9 * WEIGHTS, prior))


@each_rule
def test_a_client_of_weight_zero_might_as_well_be_absent(family, rule):
    posteriors, prior = clients(family)
    without = [0, 1, 3]
    weights = WEIGHTS.clone()
    weights[2] = 0.0
    close(
        rule.fuse(posteriors, weights, prior),
        rule.fuse(posteriors[without], weights[without], prior),
        rtol=1e-15,
        atol=0,
    )


@each_rule
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
def test_the_order_of_clients_does_not_matter(family, rule, order):
    posteriors, prior = clients(family)
    shuffled = rule.fuse(posteriors[list(order)], WEIGHTS[list(order)], prior)
    close(shuffled, rule.fuse(posteriors, WEIGHTS, prior))


TREES = [
    ((0,), ((1,), ((2,), (3,)))),
    (((0,), (1,)), ((2,), (3,))),
    ((3, 0), (2, 1)),
    ((0, 1, 2), (3,)),
    (((2,), (0, 3)), (1,)),
]


@each_rule
@pytest.mark.parametrize("tree", TREES)
def test_any_tree_of_partial_sums_equals_the_flat_sum(family, rule, tree):
    posteriors, prior = clients(family)

    def total(node):
        if all(isinstance(leaf, int) for leaf in node):
            rows = list(node)
            return take_in(rule, posteriors[rows], WEIGHTS[rows], prior)
        left, right = node
        return rule.merge(total(left), total(right))

    close(rule.finish(total(tree)), rule.fuse(posteriors, WEIGHTS, prior))


@each_rule
def test_fusing_changes_none_of_its_arguments(family, rule):
    posteriors, prior = clients(family)
    before = [t.clone() for q in (posteriors, prior) for t in q.pack().values()]
    left = take_in(rule, posteriors[:2], WEIGHTS[:2], prior)
    kept = {name: tensor.clone() for name, tensor in left.tensors.items()}
    rule.merge(left, take_in(rule, posteriors[2:], WEIGHTS[2:], prior))
    rule.finish(left)
    rule.fuse(posteriors, WEIGHTS, prior)
    after = [t for q in (posteriors, prior) for t in q.pack().values()]
    assert all(map(torch.equal, before, after))
    assert all(torch.equal(kept[name], left.tensors[name]) for name in kept)


def test_small_differences_between_float32_clients_survive():
    prior = Point(torch.tensor([1000.0]))
    step = float(np.spacing(np.float32(1000.0)))
    means = Point(torch.tensor([[1000.0], [1000.0 + 2 * step], [1000.0 + step]]))
    assert Average().fuse(means, torch.ones(3), prior).mean.item() == 1000.0 + step


@pytest.mark.parametrize("on", ["variance", "std"])
def test_zero_variances_stay_zero(on):
    certain = Gaussian(normal(3, 2), torch.zeros(3, 2, dtype=torch.float64))
    fused = Average(on=on).fuse(certain, torch.ones(3), certain[0])
    assert fused.variance.tolist() == [0.0, 0.0]


@each_rule
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 1.0, 1.0], r"weights: \(3,\) given for 4 posteriors.*one weight per client"),
        ([[1.0]] * 4, r"weights: \(4, 1\) given for 4 posteriors"),
        ([1.0, -0.5, 1.0, 1.0], r"weights: -0.5 given for client 1.*finite number >= 0"),
        ([1.0, 1.0, float("nan"), 1.0], r"weights: nan given for client 2"),
        ([1.0, 1.0, 1.0, float("inf")], r"weights: inf given for client 3"),
        ([0.0] * 4, r"weights: all are zero.*at least one above 0"),
    ],
)
def test_weights_that_are_no_weights_are_refused(family, rule, weights, message):
    posteriors, prior = clients(family)
    with pytest.raises(OptionError, match=message) as refusal:
        rule.fuse(posteriors, torch.tensor(weights), prior)
    assert "\n" not in str(refusal.value)


def test_a_pooling_rule_says_that_weights_matter():
    assert Average().weighs
    assert {"pools", "additive"} <= Average.tags


@each_rule
@pytest.mark.parametrize("chunk", [1, 3])
def test_clients_that_are_added_one_by_one_or_few_by_few_give_the_flat_sum(family, rule, chunk):
    posteriors, prior = clients(family)
    state = rule.start(prior)
    for first in range(0, 4, chunk):
        rows = slice(first, first + chunk)
        state = rule.add(state, posteriors[rows], WEIGHTS[rows])
    close(rule.finish(state), rule.fuse(posteriors, WEIGHTS, prior))


@each_rule
def test_clients_are_added_in_place(family, rule):
    posteriors, prior = clients(family)
    first = take_in(rule, posteriors[:2], WEIGHTS[:2], prior)
    second = rule.add(first, posteriors[2:], WEIGHTS[2:])
    assert second.tensors["mean"] is first.tensors["mean"]


def test_a_rule_without_a_loop_of_its_own_adds_clients_by_merging():
    class Counts(AdditiveAggregator):
        def encode(self, posteriors, weights, prior):
            return {"weight": weights.sum()}

        def decode(self, total, prior):
            return prior

    posteriors, prior = clients("point")
    rule = Counts()
    first = take_in(rule, posteriors[:1], WEIGHTS[:1], prior)
    assert rule.add(first, posteriors[1:], WEIGHTS[1:]).tensors["weight"] == WEIGHTS.sum()
    assert rule.report(first) == {}


class Last(Aggregator):
    """Takes the last client, whoever that is: what it was given can be seen in the result."""

    name = "last"
    families = ("point", "gaussian")

    def fuse(self, posteriors, weights, prior):
        self.seen = (posteriors, weights)
        return posteriors[-1]


@each_family
@pytest.mark.parametrize(
    "tree", [(((0,), (1,)), ((2,), (3,))), ((0,), ((1, 2), (3,))), (0, 1, 2, 3)]
)
def test_a_rule_that_collects_is_given_everybody_in_order(family, tree):
    posteriors, prior = clients(family)
    rule = Last()

    def total(node):
        if all(isinstance(leaf, int) for leaf in node):
            return take_in(rule, posteriors[list(node)], WEIGHTS[list(node)], prior)
        return rule.merge(*map(total, node))

    assert torch.equal(rule.finish(total(tree)).mean, posteriors.mean[3])
    close(rule.seen[0], posteriors, rtol=0, atol=0)
    assert torch.equal(rule.seen[1], WEIGHTS)


@each_rule
def test_the_state_of_nobody_adds_nothing(family, rule):
    posteriors, prior = clients(family)
    state = take_in(rule, posteriors, WEIGHTS, prior)
    for merged in (rule.merge(state, rule.start(prior)), rule.merge(rule.start(prior), state)):
        close(rule.finish(merged), rule.finish(state), rtol=0, atol=0)


@attrs.frozen(eq=False)
class Ragged(Posterior):
    """A number per parameter, and a table of draws."""

    name = "ragged"

    mean: torch.Tensor
    draws: torch.Tensor

    def sample(self, noise):
        return self.mean

    def kl(self, other):
        return self.mean.sum(-1)


def test_fields_of_any_shape_are_averaged():
    posteriors = Ragged(normal(4, 6), -normal(4, 2, 3).abs())
    fused = Average().fuse(posteriors, WEIGHTS, posteriors[0])
    for name, field in posteriors.pack().items():
        expected = np.average(field, axis=0, weights=WEIGHTS)
        np.testing.assert_allclose(fused.pack()[name], expected)
    assert len(list(State(posteriors[0]).chunks())) == 1


def test_a_sum_that_only_one_part_has_is_zero_in_the_other():
    left, right = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.full((2,), 3.0)}
    for added in (add_sums(left, right), add_sums(right, left)):
        assert added["a"].tolist() == [2.0, 2.0]
        assert added["b"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("length", "size"), [(0, 3), (1, 3), (3, 3), (7, 3)])
def test_slices_cover_every_coordinate_once(length, size):
    covered = [list(range(length))[part] for part in slices(length, size)]
    assert [i for part in covered for i in part] == list(range(length))
    assert len(covered) >= 1
    assert all(len(part) <= size for part in covered)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_a_weighted_sum_takes_weights_of_any_scale(scale):
    values = normal(4, 5, dtype=torch.float32)
    found = weighted_sum(WEIGHTS * scale, values)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found / scale, WEIGHTS.numpy() @ values.double().numpy(), rtol=1e-5)


def test_a_weighted_sum_of_nobodys_weight_is_zero():
    assert weighted_sum(torch.zeros(4), normal(4, 5)).tolist() == [0.0] * 5
