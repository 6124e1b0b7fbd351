"""Laws between rules, and rules against linear algebra on the data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore.testing import aggregation_relations as relations

from .registered import rule
from .strategies import DTYPES, cases, regressions

ORDERED = [
    ("weighted-sum", "average"),
    ("average", "linear-pool"),
    ("log-linear-pool", "average"),
    ("weighted-conflation", "log-linear-pool"),
    ("conflation", "weighted-conflation"),
]


@pytest.mark.parametrize(("smaller", "larger"), ORDERED)
@given(case=cases())
def test_one_rule_is_never_less_certain_than_the_other(smaller, larger, case):
    relations.variances_are_ordered(rule(smaller), rule(larger), case)


@given(case=cases())
def test_weighted_conflation_under_equal_weights_is_conflation(case):
    relations.equal_weights_make_conflation(rule("wc"), rule("conflation"), case)


@given(case=cases())
def test_weighted_conflation_is_at_least_as_certain_as_its_heaviest_client(case):
    relations.heaviest_client_bounds_the_variance(rule("wc"), case)


@given(case=cases())
def test_the_log_linear_pool_is_weighted_conflation_rescaled(case):
    relations.pool_is_rescaled_conflation(rule("llp"), rule("wc"), case)


@given(case=cases(zeros=False))
def test_conflation_is_weighted_least_squares(case):
    relations.product_is_weighted_least_squares(rule("conflation"), case)


@pytest.mark.parametrize("floor", [0.0, 1.0])
@given(problem=regressions(), dtype=DTYPES)
def test_weight_consolidation_of_conjugate_models_is_exact_bayes(floor, problem, dtype):
    consolidation = type(rule("dwc"))(floor=floor)
    relations.consolidation_is_exact_bayes(consolidation, problem, dtype)


@given(case=cases(clients=st.integers(1, 1)))
def test_a_single_client_is_what_every_rule_agrees_on(case):
    fused = [case.fused_by(rule(name)) for name in ("ws", "lp", "llp", "wc", "dwc", "median")]
    for one in fused:
        relations.close(rule("lp"), case, one, fused[0])
