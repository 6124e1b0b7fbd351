"""Every registered aggregator keeps every law that it claims."""

from __future__ import annotations

import pytest
from hypothesis import given

from bflcore.testing.aggregation_laws import LAWS, check_all, claimed

from .registered import label, rules
from .strategies import cases

RULES = rules()
ON_POINTS = [law for law in LAWS if law.tag in {"", "additive", "pools", "robust"}]


def check(law, case, family):
    """Check one law of all rules that claim it: to draw a case costs more than to fuse it.

    A rule that iterates is held to the kit's own cases: hundreds of fusions would take minutes.
    """
    for rule in RULES:
        if rule.accuracy:
            continue
        if family in rule.families and law in claimed(rule):
            try:
                law.check(rule, case)
            except AssertionError as error:
                raise AssertionError(f"{label(rule)}: {law.name}: {error}") from None


@pytest.mark.parametrize("law", LAWS, ids=label)
@given(case=cases())
def test_rules_keep_the_laws_that_they_claim(law, case):
    check(law, case, "gaussian")


@pytest.mark.parametrize("law", ON_POINTS, ids=label)
@given(case=cases(family="point"))
def test_rules_keep_their_laws_on_points(law, case):
    check(law, case, "point")


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_rule_keeps_its_laws_on_the_kits_own_cases(rule):
    check_all(rule)


@pytest.mark.parametrize("law", LAWS, ids=label)
def test_every_law_is_claimed_by_some_rule(law):
    assert any(law in claimed(rule) for rule in RULES)
