"""Which way metrics get better: every one that is recorded has a direction, or only describes."""

import torch

from bflcore.problem import metrics
from bflcore.problem.directions import HIGHER, LOWER, direction
from bflcore.problem.ood import ood_sums

# What is neither to be high nor to be low: shares that are due, and parts of the uncertainty.
DESCRIBE = {
    *("entropy", "aleatoric", "epistemic", "mutual_information"),
    *(f"coverage{level}" for level in metrics.INTERVALS),
}


def recorded():
    """Return the names of all metrics of predictions."""
    p = torch.rand(3, 40, 7, dtype=torch.float64).softmax(-1)
    mean, variance, y = torch.rand(3, 40, 1, dtype=torch.float64)
    sums = (
        metrics.classification_sums(p, torch.arange(40) % 7),
        metrics.regression_sums(mean, variance, y),
        ood_sums(torch.rand(30), torch.rand(30)),
    )
    return {name for one in sums for name in metrics.metrics_of(one)}


def test_every_recorded_metric_has_a_direction_or_only_describes():
    assert recorded() == HIGHER | LOWER | DESCRIBE
    assert not DESCRIBE & (HIGHER | LOWER)


def test_a_direction_is_that_in_which_a_model_gets_better():
    higher = ["personal.accuracy", "ood.auroc", "global.f1", "top5"]
    lower = ["validation.novel.nll", "validation.rmse", "ood.fpr95", "personal.aurc"]
    neither = ["personal.coverage90", "personal.entropy", "posterior.x"]
    found = [[direction(name) for name in names] for names in (higher, lower, neither)]
    assert found == [[1] * 4, [-1] * 4, [0] * 3]
