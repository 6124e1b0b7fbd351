"""What the framework relies on, checked for every part of this plugin."""

import pytest

from bfl_baselines import plugin
from bflcore.testing import parametrize_with_checks, problems

PARTS = [*plugin.bfl_posteriors(), *plugin.bfl_inferences(), *plugin.bfl_methods()]


@pytest.fixture(autouse=True)
def few_inner_steps(monkeypatch):
    """Let pFedMe and the chain take few steps within a step: none of the checks needs more."""
    monkeypatch.setitem(problems.QUICK, "inner_steps", 2)


@parametrize_with_checks(PARTS)
def test_conformance(check):
    check.function()
