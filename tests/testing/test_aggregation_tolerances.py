"""What agrees to rounding passes, and what does not is named with its parameter."""

from __future__ import annotations

import pytest
import torch

from bflcore import Average
from bflcore.posteriors import Gaussian
from bflcore.testing.aggregation_cases import Case
from bflcore.testing.aggregation_tolerances import close

ONE = Gaussian(torch.tensor([1.0, 2.0]).double(), torch.tensor([0.5, 0.1]).double())
CASE = Case(ONE.map(lambda t: t[None]), torch.ones(1).double(), ONE)


def test_a_difference_of_one_rounding_is_allowed():
    close(Average(), CASE, Gaussian(ONE.mean * (1 + 2e-16), ONE.variance), ONE)


@pytest.mark.parametrize("field", ["mean", "variance"])
def test_a_larger_difference_is_named_with_its_parameter(field):
    wrong = ONE.pack()
    wrong[field] = wrong[field] + torch.tensor([0.0, 1e-9]).double()
    with pytest.raises(AssertionError, match=f"{field} at parameter 1"):
        close(Average(), CASE, Gaussian(**wrong), ONE)
