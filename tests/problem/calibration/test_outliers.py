import numpy as np
import torch

from bflcore.problem.calibration.outliers import Outliers
from bflcore.problem.likelihoods import Predictive
from bflcore.problem.ood import ood_scores


def predicted(count, flatness, seed=0):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(1, 3, count, 4)) / flatness)
    return Predictive((3 * logits).softmax(-1)), torch.zeros(count, dtype=torch.int64)


def test_the_flagged_are_above_the_conformal_quantile_of_the_scores():
    made, y = predicted(99, 1)
    fresh, _ = predicted(500, 1, seed=1)
    one = Outliers(share=0.9)
    flags = one.unlike(one.sums(made, y), fresh)
    limit = ood_scores(made)[0].sort()[0][89]  # the 90th of 99: 0.9 * (99 + 1)
    scores = ood_scores(fresh)[0]
    assert not flags[scores <= limit].any()
    assert flags[scores > 1.016 * limit].all()
    assert 0.05 < flags.double().mean() < 0.15


def test_uncertain_predictions_are_flagged_more_often():
    made, y = predicted(200, 1)
    one = Outliers()
    usual, strange = (
        one.unlike(one.sums(made, y), predicted(500, flatness, seed=1)[0]).double().mean()
        for flatness in (1, 20)
    )
    assert usual < 0.1
    assert strange > 0.5


def test_with_too_few_samples_nothing_is_flagged():
    made, y = predicted(5, 1)
    assert not Outliers().unlike(Outliers().sums(made, y), predicted(50, 20)[0]).any()
