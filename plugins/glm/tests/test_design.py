"""Columns that determine each other are refused by name; others never are."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from bfl_glm.design import check_columns, is_linear
from bfl_glm.sites import Laplace
from bflcore import GaussianNoise, OptionError

from .pooled import design
from .test_sites import federated


def problem_of(x, client, **given):
    return federated(x, np.zeros((len(x), 1)), client, GaussianNoise(), **given)


@pytest.fixture
def samples():
    return design()


def test_correlated_columns_pass(samples):
    check_columns(problem_of(*samples))


@pytest.mark.parametrize("missing", [False, True])
def test_a_combination_of_columns_is_refused(samples, missing):
    x, client = samples
    x = np.insert(x, 4, 2 * x[:, 0] - x[:, 2] + 7, axis=1)
    if missing:
        x[3, 5] = np.nan
    with pytest.raises(OptionError, match=r"^--data: column 4 \(from 0\) is a linear combination"):
        check_columns(problem_of(x, client))


def test_a_constant_column_is_a_multiple_of_the_intercept(samples):
    x, client = samples
    x[:, 2] = 40.1
    with pytest.raises(OptionError, match="column 2 .*combination of the intercept"):
        check_columns(problem_of(x, client))


def test_columns_of_very_different_size_pass(samples):
    x, client = samples
    check_columns(problem_of(x * 10.0 ** np.arange(-3, 3) + 50, client))


def test_with_fewer_samples_than_columns_the_prior_decides():
    x, client = design(sizes=(3, 2), columns=8)
    check_columns(problem_of(x, client))


def test_the_user_can_let_the_prior_decide(samples):
    x, client = samples
    x[:, 2] = x[:, 1]
    with pytest.raises(OptionError, match="inference.collinear=allow"):
        Laplace().check(problem_of(x, client))
    Laplace(collinear="allow").check(problem_of(x, client))


def test_a_network_with_hidden_units_is_not_linear(samples):
    assert is_linear(problem_of(*samples))
    hidden = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 1))
    assert not is_linear(problem_of(*samples, network=hidden))
