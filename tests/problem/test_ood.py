import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import roc_auc_score

from bflcore.problem import metrics
from bflcore.problem.likelihoods import Predictive
from bflcore.problem.ood import ood_scores, ood_sums, ood_unit_scores


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


def test_unit_scores_are_1_for_an_even_prediction_and_0_for_a_certain_one():
    draws = torch.tensor([[[[0.25] * 4, [1.0, 0, 0, 0]]]])
    assert ood_unit_scores(Predictive(draws)).tolist() == [[pytest.approx(1), 0]]
    regression = Predictive(torch.tensor([[[[0.0]], [[2.0]]]]), torch.tensor(3.0))
    assert ood_unit_scores(regression).equal(ood_scores(regression))


def test_the_separation_of_own_from_foreign_samples_is_scikit_learns():
    rng = np.random.default_rng(0)
    own, foreign = rng.beta(1, 8, 300), rng.beta(2, 3, 200)
    parts = [
        ood_sums(torch.tensor(own[:100]), torch.tensor(foreign)),
        ood_sums(torch.tensor(own[100:]), torch.tensor(foreign[:0])),
    ]
    sums = metrics.add(*parts)
    found = metrics.metrics_of(sums)
    exact = roc_auc_score([0] * 300 + [1] * 200, np.concatenate([own, foreign]))
    assert set(found) == {"auroc", "fpr95"}
    assert found["auroc"] == pytest.approx(exact, abs=0.005)
    passes = (foreign <= np.quantile(own, 0.95)).mean()
    assert found["fpr95"] == pytest.approx(passes, abs=0.05)
    assert float(sums["examples"]) == 300
