"""The core's methods are the recipes they cite."""

import pytest

from bflcore import FedAvg, FedVI
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry


def resolved(method, **file):
    return resolve(load_registry(), method, file, {})


def test_fedvi_is_the_studys_flipout_under_its_learning_rate_schedule():
    inference = resolved("fedvi").inference
    assert inference.estimator == "flipout"
    assert inference.lr_at(0) == inference.lr_at(50) == inference.lr
    # 4 % a round after round 50 (Fischer et al. 2024).
    assert inference.lr_at(53) == pytest.approx(0.96**3 * inference.lr)


def test_fedvi_keeps_its_first_prior_and_averages_by_examples():
    assert (FedVI.aggregator, FedVI.weighting, FedVI.hyper) == ("average", "examples", "fixed")
    assert (FedAvg.aggregator, FedAvg.weighting, FedAvg.share) == ("average", "examples", "all")


def test_fedvis_defaults_give_way_to_the_users():
    faster = {"estimator": "local-reparameterisation", "lr_decay": 0.0}
    inference = resolved("fedvi", inference=faster).inference
    assert inference.estimator == "local-reparameterisation"
    assert inference.lr_at(99) == inference.lr
