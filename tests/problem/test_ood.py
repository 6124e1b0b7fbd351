import pytest
import scipy.stats
import torch

from bflcore.problem.likelihoods import Predictive
from bflcore.problem.ood import ood_scores


def test_classification_scores_are_the_entropies_of_the_mean_of_the_draws():
    draws = torch.rand(2, 5, 7, 3).softmax(-1)
    expected = scipy.stats.entropy(draws.double().mean(1).numpy(), axis=-1)
    assert ood_scores(Predictive(draws)).numpy() == pytest.approx(expected, rel=1e-6)


def test_a_closed_form_is_the_prediction_that_is_scored():
    draws, closed = torch.rand(1, 4, 6, 3).softmax(-1), torch.rand(1, 6, 3).softmax(-1)
    scores = ood_scores(Predictive(draws, closed_form=closed))
    assert scores.numpy() == pytest.approx(scipy.stats.entropy(closed.numpy(), axis=-1), rel=1e-6)


def test_regression_scores_are_the_share_of_variance_that_the_parameters_cause():
    draws = torch.tensor([[[[0.0]], [[2.0]]]])  # [K, S, B, C]: variance 1 over the draws
    assert ood_scores(Predictive(draws, torch.tensor(3.0))).item() == pytest.approx(0.25)
    per_client = Predictive(draws.expand(2, 2, 1, 1), torch.tensor([1.0, 3.0])[:, None, None])
    assert ood_scores(per_client).tolist() == [[pytest.approx(0.5)], [pytest.approx(0.25)]]
