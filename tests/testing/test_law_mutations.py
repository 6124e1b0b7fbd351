"""The laws have teeth: each of these wrong rules breaks the law that names its mistake."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bfl_aggregators.plugin import (
    Conflation,
    LinearPool,
    LogLinearPool,
    Median,
    TrimmedMean,
    WeightConsolidation,
    WeightedConflation,
    WeightedSum,
)
from bflcore import Average, Gaussian, ProductOfChanges, component
from bflcore.testing import aggregation_laws as laws
from bflcore.testing import aggregation_relations as relations


def moments(case):
    """Return weights that sum to one and the clients' moments, clients first."""
    share = (case.weights / case.weights.sum())[:, None]
    return share, case.posteriors.mean.double(), case.posteriors.variance.double()


def wrong(base, formula, **fields):
    """Return `base` with another formula: weights, means and variances in, moments out."""

    def fuse(self, posteriors, weights, prior):
        mean, variance = formula(*moments(laws.Case(posteriors, weights, prior)), prior)
        return Gaussian(mean.to(prior.mean.dtype), variance.to(prior.mean.dtype))

    return component(type(f"Other{base.__name__}", (base,), {"fuse": fuse, **fields}))()


def total(values):
    return values.sum(0)


def spread(w, mu):
    return total(w * (mu - total(w * mu)) ** 2)


def floored(mu, s, prior):
    """The product of changes, never wider than the prior."""
    mean, variance = consolidated(mu, s, prior, surplus=len(s) - 1)
    return mean, variance.minimum(prior.variance)


def doubled(self, posteriors, weights, prior):
    fused = Average().fuse(posteriors, weights, prior)
    return fused.map(torch.Tensor.double)


# What is wrong -> the rule, and the law that notices.
SINGLE = {
    "weighted sum with w instead of w squared": (
        wrong(WeightedSum, lambda w, mu, s, _: (total(w * mu), total(w * s))),
        laws.identical_clients_of_equal_weight_divide_their_variance,
    ),
    "weighted sum without weights": (
        wrong(WeightedSum, lambda w, mu, s, _: (mu.mean(0), s.mean(0) / len(s))),
        laws.zero_weight_is_absence,
    ),
    "average of standard deviations, not squared again": (
        wrong(Average, lambda w, mu, s, _: (total(w * mu), total(w * s.sqrt()))),
        laws.scale_is_carried_through,
    ),
    "linear pool that forgets the means' variance": (
        wrong(LinearPool, lambda w, mu, s, _: (total(w * mu), total(w * s))),
        laws.variance_holds_that_of_the_means,
    ),
    "linear pool with an unweighted variance of the means": (
        wrong(
            LinearPool,
            lambda w, mu, s, _: (
                total(w * mu),
                total(w * s) + ((mu - total(w * mu)) ** 2).mean(0),
            ),
        ),
        laws.variance_holds_that_of_the_means,
    ),
    "linear pool with the sample variance of the means": (
        wrong(
            LinearPool,
            lambda w, mu, s, _: (
                total(w * mu),
                total(w * s) + spread(w, mu) * len(mu) / max(len(mu) - 1, 1),
            ),
        ),
        laws.variance_holds_that_of_the_means,
    ),
    "linear pool about the origin, whose squares cancel": (
        wrong(
            LinearPool,
            lambda w, mu, s, _: (
                total(w * mu),
                total(w * (s + (mu + 1e4) ** 2)) - total(w * (mu + 1e4)) ** 2,
            ),
        ),
        laws.one_client_is_returned,
    ),
    "log-linear pool with an arithmetic mean": (
        wrong(LogLinearPool, lambda w, mu, s, _: (total(w * mu), 1 / total(w / s))),
        laws.certain_clients_decide,
    ),
    "log-linear pool that adds evidence": (
        wrong(
            LogLinearPool,
            lambda w, mu, s, _: (total(w * mu / s) / total(w / s), 1 / total(1 / s)),
        ),
        laws.identical_clients_keep_their_variance,
    ),
    "conflation that weighs": (
        wrong(
            Conflation,
            lambda w, mu, s, _: (total(w * mu / s) / total(w / s), 1 / total(w / s)),
        ),
        laws.weights_are_ignored,
    ),
    "conflation that pools": (
        wrong(Conflation, lambda w, mu, s, _: (total(mu / s) / total(1 / s), 1 / (1 / s).mean(0))),
        laws.identical_clients_of_equal_weight_divide_their_variance,
    ),
    "precisions without the limit at zero variance": (
        wrong(Conflation, lambda w, mu, s, _: (total(mu / s) / total(1 / s), 1 / total(1 / s))),
        laws.results_are_valid_and_keep_their_dtype,
    ),
    "weighted conflation without weights in the numerator": (
        wrong(
            WeightedConflation,
            lambda w, mu, s, _: (total(mu / s) / total(w / s), w.max() / total(w / s)),
        ),
        laws.shift_is_carried_through,
    ),
    "weighted conflation without the largest weight": (
        wrong(
            WeightedConflation,
            lambda w, mu, s, _: (total(w * mu / s) / total(w / s), 1 / total(w / s)),
        ),
        laws.identical_clients_of_equal_weight_divide_their_variance,
    ),
    "weighted conflation with the weights' sum for the largest, unnormalised": (
        wrong(
            WeightedConflation,
            lambda w, mu, s, _: (total(w * mu / s) / total(w / s), 0.5 / total(w / s)),
        ),
        laws.one_client_is_returned,
    ),
    "consolidation that subtracts K priors": (
        wrong(
            WeightConsolidation,
            lambda w, mu, s, prior: consolidated(mu, s, prior, surplus=len(s)),
        ),
        laws.one_client_is_returned,
    ),
    "consolidation that subtracts no prior": (
        wrong(WeightConsolidation, lambda w, mu, s, prior: consolidated(mu, s, prior, surplus=0)),
        laws.unchanged_priors_come_back,
    ),
    "consolidation that forgets the prior's mean": (
        wrong(
            WeightConsolidation,
            lambda w, mu, s, prior: consolidated(mu, s, prior, surplus=len(s) - 1, at=0.0),
        ),
        laws.unchanged_priors_come_back,
    ),
    "product of changes that loses certainty to a floor": (
        wrong(ProductOfChanges, lambda w, mu, s, prior: floored(mu, s, prior)),
        laws.changes_multiply,
    ),
    "product of changes that counts the first client twice": (
        wrong(
            ProductOfChanges,
            lambda w, mu, s, prior: consolidated(
                torch.cat([mu, mu[:1]]), torch.cat([s, s[:1]]), prior, surplus=len(s)
            ),
        ),
        laws.changes_multiply,
    ),
    "median of an even number that takes the lower": (
        wrong(Median, lambda w, mu, s, _: (mu.median(0).values, s.median(0).values)),
        laws.scale_is_carried_through,
    ),
    "trimmed mean that believes weights": (
        wrong(TrimmedMean, lambda w, mu, s, _: (total(w * mu), total(w * s))),
        laws.weights_are_ignored,
    ),
    "an average that claims half its influence": (
        component(
            type(
                "Modest",
                (Average,),
                {"influence": lambda self, q, w, p: Average.influence(self, q, w, p) / 2},
            )
        )(),
        laws.influence_is_as_stated,
    ),
    "a mean that claims to be a median": (
        wrong(Median, lambda w, mu, s, _: (mu.mean(0), s.mean(0))),
        laws.liars_do_not_decide,
    ),
    "the first client, whoever that is": (
        wrong(Average, lambda w, mu, s, _: (mu[0], s[0])),
        laws.order_never_matters,
    ),
    "a result in the wrong dtype": (
        wrong(Average, lambda w, mu, s, _: (total(w * mu), total(w * s)), fuse=doubled),
        laws.results_are_valid_and_keep_their_dtype,
    ),
    "a prior that leaks into the mean": (
        wrong(
            Average,
            lambda w, mu, s, prior: (total(w * mu) * 0.99 + prior.mean * 0.01, total(w * s)),
        ),
        laws.prior_is_only_an_origin,
    ),
    "weights of which the scale matters": (
        component(
            type(
                "Unnormalised",
                (Average,),
                {
                    "decode": lambda self, total, prior: Gaussian(
                        (total["mean"] + prior.mean).to(prior.mean.dtype),
                        total["variance"].to(prior.mean.dtype),
                    )
                },
            )
        )(),
        laws.scale_of_weights_never_matters,
    ),
}


def consolidated(mu, s, prior, surplus, at=None):
    start = prior.mean.double() if at is None else at
    precision = total(1 / s) - surplus / prior.variance.double()
    natural = total(mu / s) - surplus * start / prior.variance.double()
    return natural / precision, 1 / precision


def combining(base, combine):
    """Return `base` with another way to combine partial sums."""
    return component(type(f"Other{base.__name__}", (base,), {"combine": combine}))()


def plain(self, left, right):
    return {name: left[name] + right[name] for name in left}


PARTIAL = {
    "largest weights that add up": combining(WeightedConflation, plain),
    "linear pools that forget how far their centres are apart": combining(LinearPool, plain),
    "partial sums of which only the newer counts": combining(
        Average, lambda self, left, right: dict(right)
    ),
}


ABOUT_ZEROS = (laws.certain_clients_decide, laws.results_are_valid_and_keep_their_dtype)


def without_zeros():
    """Yield the kit's cases in which every variance is positive, as textbook formulas need."""
    return (case for case in laws.cases() if bool((case.posteriors.variance > 0).all()))


def broken(rule, law):
    """Return whether any of the kit's cases shows that `rule` breaks `law`."""
    for case in laws.cases() if law in ABOUT_ZEROS else without_zeros():
        try:
            law(rule, case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("rule", "law"), SINGLE.values(), ids=SINGLE)
def test_a_wrong_rule_breaks_the_law_that_names_its_mistake(rule, law):
    assert broken(rule, law)


@pytest.mark.parametrize(("rule", "law"), SINGLE.values(), ids=SINGLE)
def test_the_right_rule_claims_and_keeps_that_law(rule, law):
    right = type(rule).__base__()
    assert law in {known.check for known in laws.claimed(right)}
    assert not broken(right, law)


@pytest.mark.parametrize("rule", PARTIAL.values(), ids=PARTIAL)
def test_a_wrong_way_to_combine_partial_sums_breaks_grouping(rule):
    assert broken(rule, laws.grouping_never_matters)


# The textbook formulas, through the same construction as the wrong ones.
TEXTBOOK = [
    wrong(Average, lambda w, mu, s, _: (total(w * mu), total(w * s))),
    wrong(WeightedSum, lambda w, mu, s, _: (total(w * mu), total(w**2 * s))),
    wrong(LinearPool, lambda w, mu, s, _: (total(w * mu), total(w * s) + spread(w, mu))),
    wrong(LogLinearPool, lambda w, mu, s, _: (total(w * mu / s) / total(w / s), 1 / total(w / s))),
    wrong(Conflation, lambda w, mu, s, _: (total(mu / s) / total(1 / s), 1 / total(1 / s))),
    wrong(
        WeightedConflation,
        lambda w, mu, s, _: (total(w * mu / s) / total(w / s), w.max() / total(w / s)),
    ),
    wrong(
        WeightConsolidation,
        lambda w, mu, s, prior: consolidated(mu, s, prior, surplus=len(s) - 1),
    ),
]


@pytest.mark.parametrize("rule", TEXTBOOK, ids=lambda rule: rule.name)
def test_the_textbook_formula_keeps_every_law_where_no_variance_is_zero(rule):
    for law in laws.claimed(rule):
        for case in without_zeros():
            law.check(rule, case)


WRONG_PAIRS = {
    "weighted conflation with w squared in the variance": (
        wrong(
            WeightedConflation,
            lambda w, mu, s, _: (
                total(w * mu / s) / total(w / s),
                w.max() ** 2 / total(w**2 / s),
            ),
        ),
        lambda rule, case: relations.pool_is_rescaled_conflation(LogLinearPool(), rule, case),
    ),
    "conflation that multiplies its variance by K": (
        wrong(
            Conflation,
            lambda w, mu, s, _: (total(mu / s) / total(1 / s), len(s) / total(1 / s)),
        ),
        lambda rule, case: relations.equal_weights_make_conflation(
            WeightedConflation(), rule, case
        ),
    ),
    "conflation whose mean is an average": (
        wrong(Conflation, lambda w, mu, s, _: (mu.mean(0), 1 / total(1 / s))),
        relations.product_is_weighted_least_squares,
    ),
}


@pytest.mark.parametrize(("rule", "law"), WRONG_PAIRS.values(), ids=WRONG_PAIRS)
def test_a_wrong_rule_breaks_its_relation_to_others(rule, law):
    assert broken(rule, law)


@pytest.mark.parametrize(
    "surplus", [lambda k: k, lambda k: 0, lambda k: k - 2], ids=["K", "none", "K-2"]
)
def test_consolidation_with_a_wrong_number_of_priors_is_not_bayes(surplus):
    rule = wrong(
        WeightConsolidation,
        lambda w, mu, s, prior: consolidated(mu, s, prior, surplus=surplus(len(s))),
    )
    draw = np.random.default_rng(0)
    x = tuple(draw.normal(size=(4, 1)) * np.tile(np.eye(2), (2, 1)) for _ in range(3))
    y = tuple(draw.normal(size=4) for _ in range(3))
    problem = relations.Regression(x, y, 0.5, draw.normal(size=2), np.array([1.0, 2.0]))
    relations.consolidation_is_exact_bayes(WeightConsolidation(), problem, torch.float64)
    with pytest.raises(AssertionError, match="at parameter"):
        relations.consolidation_is_exact_bayes(rule, problem, torch.float64)
