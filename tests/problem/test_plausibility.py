"""Sums of metrics that cannot be, and those of honest clients, however bad their model is."""

from __future__ import annotations

import pytest
import torch

from bflcore.problem import metrics
from bflcore.problem.ood import ood_sums
from bflcore.problem.plausibility import impossible

NAN, INF = float("nan"), float("inf")


def classified(samples=7, classes=3, draws=4, seed=0, sharpness=1.0):
    noise = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(draws, samples, classes, generator=noise)
    labels = torch.randint(classes, (samples,), generator=noise)
    return metrics.classification_sums(logits.softmax(-1), labels)


def regressed(samples=5, scale=1.0, seed=0):
    noise = torch.Generator().manual_seed(seed)
    mean, y = (scale * torch.randn(samples, 2, generator=noise) for _ in range(2))
    return metrics.regression_sums(mean, torch.full_like(mean, 0.1), y)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 1e3])
@pytest.mark.parametrize(("samples", "classes"), [(1, 2), (7, 3), (300, 10), (2500, 100)])
def test_honest_sums_are_possible(samples, classes, sharpness):
    for seed in range(5):
        found = classified(samples, classes, seed=seed, sharpness=sharpness)
        assert impossible(found) == ""
        assert impossible(metrics.add(found, found)) == ""
    assert impossible(regressed(samples, scale=10**sharpness if sharpness < 9 else 1e15)) == ""
    scores = torch.rand(samples), torch.rand(9)
    assert impossible(ood_sums(*scores)) == ""


def test_a_model_that_diverged_has_possible_sums():
    diverged = metrics.classification_sums(torch.full((2, 4, 3), NAN), torch.tensor([0, 1, 2, 0]))
    assert impossible(diverged) == ""
    mean = torch.tensor([[NAN], [INF]])
    assert impossible(metrics.regression_sums(mean, torch.ones(2, 1), torch.zeros(2, 1))) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("examples", value) for value in (0.0, -3.0, 2.5, NAN, INF, 1e16)],
        *[("accuracy", value) for value in (-1.0, 8.0, 1e9, NAN, INF)],
        *[("nll", value) for value in (-0.1, 7 * 28.0)],
        *[("brier", value) for value in (-0.1, 14.1)],
        *[("entropy", value) for value in (-0.1, 7.1)],
        ("mutual_information", -1.0),
    ],
)
def test_impossible_numbers_are_named(name, value):
    sums = {**classified(), name: torch.tensor(value, dtype=torch.float64)}
    assert impossible(sums).startswith(f"{name} is ")


@pytest.mark.parametrize("name", ["bin_count", "level_count", "confusion", "ranks"])
@pytest.mark.parametrize("change", [lambda t: t - 1, lambda t: t * 0, lambda t: t * 2])
def test_histograms_count_all_samples_once(name, change):
    sums = classified()
    assert impossible({**sums, name: change(sums[name])}).startswith(f"{name} ")


def test_histograms_that_are_not_numbers_are_named():
    sums = classified()
    wrong = torch.full_like(sums["bin_count"], NAN)
    assert "not a number" in impossible({**sums, "bin_count": wrong})


@pytest.mark.parametrize("name", ["bin_hits", "level_hits", "bin_confidence"])
def test_hits_are_not_more_than_the_samples_of_a_bin(name):
    sums = classified()
    assert name in impossible({**sums, name: sums[name] + 1})
    assert name in impossible({**sums, name: sums[name] - 9})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("squared_error", -1.0, "squared_error is negative"),
        ("values", 0.0, "values is 0, not a number of targets"),
        ("values", NAN, "values is nan"),
        ("inside90", 99.0, "inside90 is not between 0 and 10"),
        ("inside50", -1.0, "inside50 is not between"),
    ],
)
def test_impossible_sums_of_a_regression_are_named(name, value, reason):
    sums = {**regressed(), name: torch.tensor(value, dtype=torch.float64)}
    assert impossible(sums).startswith(reason)


def test_further_figures_are_not_negative():
    sums = {**classified(), **metrics.per_sample({"set_size": torch.tensor([1.0, 2.0])})}
    assert impossible(sums) == ""
    assert "negative" in impossible({**sums, "mean.set_size": torch.tensor(-1.0)})
